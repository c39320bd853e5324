"""Sending without a timeout of Python's, which makes of each send a wait and a write for every piece that fits the buffer."""

from __future__ import annotations

import contextlib
import functools
import socket
import ssl
import struct
import time
from collections.abc import Callable, Iterator

from residual_store.page_pipe import PagePipe

__all__ = ["limit_sends", "waiting_in_kernel"]

_TIMEVAL = struct.Struct("@ll")

_LONGEST_CALL_SECONDS = 1.0
"""A call ends after this time even if the peer takes a little now and then, so that a peer which stopped is told apart."""


@contextlib.contextmanager
def waiting_in_kernel(
    sock: socket.socket, seconds: float, *, by_reference: bool = False
) -> Iterator[Callable[[memoryview], None]]:
    """What sends all of a run of bytes, while the kernel waits for room; ``by_reference`` through a `PagePipe`.

    Raises TimeoutError when the peer has taken nothing for ``seconds``.

    A blocking ``send`` is one call of the kernel, which goes on at once when the peer has taken something.
    A socket with TLS is left as it is, because it waits for other things too.
    """
    if isinstance(sock, ssl.SSLSocket):
        yield sock.sendall
        return
    before = sock.gettimeout()
    limit_sends(sock, min(seconds / 4, _LONGEST_CALL_SECONDS))
    sock.settimeout(None)
    try:
        with PagePipe(sock) if by_reference else contextlib.nullcontext(sock) as way:
            yield functools.partial(_send, way.send, seconds=seconds)
    finally:
        sock.settimeout(before)


def _send(send: Callable[[memoryview], int], data: memoryview, *, seconds: float) -> None:
    sent, moved = 0, time.monotonic()
    while sent < len(data):
        try:
            sent += send(data[sent:])
            moved = time.monotonic()
        except BlockingIOError:
            if time.monotonic() - moved >= seconds:
                raise TimeoutError(f"the peer took nothing for {seconds:g} s") from None


def limit_sends(sock: socket.socket, seconds: float) -> None:
    """Let a ``send`` of a blocking socket return after this time, with what it has sent or with BlockingIOError."""
    # At least one microsecond, because none means no limit.
    timeval = _TIMEVAL.pack(*divmod(max(round(seconds * 1e6), 1), 1_000_000))
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, timeval)
