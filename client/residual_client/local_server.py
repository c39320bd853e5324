"""A server of this machine, in a process of its own, for as long as it is needed."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from residual_store.errors import Unreachable

__all__ = ["local_server"]

_STOP_SECONDS = 30.0


@contextlib.contextmanager
def local_server(root: Path | None = None) -> Iterator[str]:
    """The URL of a server on a free loopback port, which is stopped at the end.

    Without ``root`` it keeps bundles in memory only.
    Raises `Unreachable` if it does not start; why stands on its standard error.

    >>> with local_server() as url, open_store(url) as store:
    ...     store.usage().runs
    ()
    """
    command = [sys.executable, "-m", "residual_store.cli", "serve", "--port", "0"]
    command += ["--root", str(root)] if root is not None else []
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:  # noqa: S603 - all of it is ours
        try:
            yield _url(process)
        finally:
            _stop(process)


def _url(process: subprocess.Popen[str]) -> str:
    line = process.stdout.readline() if process.stdout is not None else ""
    before, _, url = line.strip().partition(" listens on ")
    if not url:
        raise Unreachable(f"the server did not start: it said {before!r}")
    return url


def _stop(process: subprocess.Popen[str]) -> None:
    process.terminate()
    try:
        process.wait(_STOP_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
