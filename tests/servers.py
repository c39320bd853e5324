"""Real servers in processes of their own, for tests that cross a socket."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Server", "running_server", "running_stock_server", "start_server", "until"]


@dataclass(frozen=True, kw_only=True)
class Server:
    """A running `residual-store serve`."""

    url: str
    root: Path | None
    process: subprocess.Popen[str]

    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2])

    def stop(self, number: int = signal.SIGTERM, *, seconds: float = 30) -> int:
        """Send a signal and wait for the end; returns the exit status."""
        self.process.send_signal(number)
        return self.wait(seconds=seconds)

    def wait(self, *, seconds: float = 30) -> int:
        """Wait for the end; returns the exit status."""
        try:
            return self.process.wait(seconds)
        finally:
            if self.process.poll() is not None and self.process.stdout is not None:
                self.process.stdout.close()


def start_server(
    *,
    root: Path | None = None,
    uds: Path | None = None,
    options: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
    log: Path | None = None,
) -> Server:
    """Start `residual-store serve` on a free port or a unix socket and wait until it says that it listens.

    What it writes to stderr goes to the file ``log``, if there is one.
    """
    command = [sys.executable, "-m", "residual_store.cli", "serve", "--port", "0", *options]
    command += ["--root", str(root)] if root is not None else []
    command += ["--uds", str(uds)] if uds is not None else []
    return _started(command, root=root, environment=environment, log=log)


def _started(
    command: Sequence[str],
    *,
    root: Path | None,
    environment: Mapping[str, str] | None = None,
    log: Path | None = None,
) -> Server:
    with log.open("a") if log is not None else contextlib.nullcontext() as errors:
        process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            env={**os.environ, **(environment or {})},
        )
    assert process.stdout is not None
    line = process.stdout.readline()
    if " listens on " not in line:
        process.kill()
        process.wait()
        process.stdout.close()
        raise RuntimeError(f"the server did not start: {line!r}")
    return Server(url=line.split(" listens on ")[1].strip(), root=root, process=process)


@contextlib.contextmanager
def running_server(
    *,
    root: Path | None = None,
    uds: Path | None = None,
    options: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
    log: Path | None = None,
) -> Iterator[Server]:
    """A server that is stopped at the end, whatever happens."""
    server = start_server(root=root, uds=uds, options=options, environment=environment, log=log)
    with _stopped_at_the_end(server):
        yield server


@contextlib.contextmanager
def running_stock_server(*, root: Path) -> Iterator[Server]:
    """The app served as any ASGI app is, see `tests.stock_server`."""
    server = _started([sys.executable, "-m", "tests.stock_server", root.as_uri()], root=root)
    with _stopped_at_the_end(server):
        yield server


@contextlib.contextmanager
def _stopped_at_the_end(server: Server) -> Iterator[None]:
    try:
        yield
    finally:
        with contextlib.suppress(ProcessLookupError, subprocess.TimeoutExpired):
            server.stop()
        server.stop(signal.SIGKILL)


def until(condition: Callable[[], object], *, seconds: float = 20, what: str = "the condition") -> None:
    """Wait until ``condition`` holds; fails the test if it does not within ``seconds``."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"{what} did not come true within {seconds} s"
        time.sleep(0.005)
