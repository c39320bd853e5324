"""A server for the demo, in a process of its own."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from residual_store.errors import Unreachable

__all__ = ["server"]

_STOP_SECONDS = 30.0


@contextlib.contextmanager
def server(root: Path) -> Iterator[str]:
    """The URL of a server on a free loopback port, which is stopped at the end.

    Raises `Unreachable` if it does not start; why stands on its standard error.

    >>> with server(root) as url:
    ...     connect(url).store.usage().runs
    ()
    """
    command = [sys.executable, "-m", "residual_store.cli", "serve", "--port", "0", "--root", str(root)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:  # noqa: S603 - all of it is ours
        try:
            yield _url(process)
        finally:
            _stop(process)


def _url(process: subprocess.Popen[str]) -> str:
    line = process.stdout.readline() if process.stdout is not None else ""
    before, _, url = line.strip().partition(" listens on ")
    if not url:
        raise Unreachable(f"the server of the demo did not start: it said {before!r}")
    return url


def _stop(process: subprocess.Popen[str]) -> None:
    process.terminate()
    try:
        process.wait(_STOP_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
