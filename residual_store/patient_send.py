"""Sending without a timeout of Python's, which makes of each send a wait and a write for every piece that fits the buffer."""

from __future__ import annotations

import contextlib
import functools
import socket
import ssl
import struct
import time
from collections.abc import Callable, Iterator

__all__ = ["waiting_in_kernel"]

_TIMEVAL = struct.Struct("@ll")

_ENOUGH = 0.9
"""The share of the time after which a call has waited for all of it: the kernel counts in ticks."""


@contextlib.contextmanager
def waiting_in_kernel(sock: socket.socket, seconds: float) -> Iterator[Callable[[memoryview], None]]:
    """What sends all of a run of bytes, while the kernel waits for room, for ``seconds`` at most; raises TimeoutError.

    A blocking ``send`` is one call of the kernel, which goes on at once when the peer has taken something.
    A socket with TLS is left as it is, because it waits for other things too.
    """
    if isinstance(sock, ssl.SSLSocket):
        yield sock.sendall
        return
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _timeval(seconds))
    before = sock.gettimeout()
    sock.settimeout(None)
    try:
        yield functools.partial(_send, sock, seconds=seconds)
    finally:
        sock.settimeout(before)


def _send(sock: socket.socket, data: memoryview, *, seconds: float) -> None:
    """Not `sendall`, which goes on after a call that has waited in vain but sent something first."""
    sent = 0
    while sent < len(data):
        started = time.monotonic()
        with contextlib.suppress(BlockingIOError):
            sent += sock.send(data[sent:])
        if sent < len(data) and time.monotonic() - started >= seconds * _ENOUGH:
            raise TimeoutError(f"the peer did not take all in {seconds:g} s")


def _timeval(seconds: float) -> bytes:
    # At least one microsecond, because none means no limit.
    return _TIMEVAL.pack(*divmod(max(round(seconds * 1e6), 1), 1_000_000))
