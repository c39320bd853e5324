"""Loopback: sockets within one host, where small buffers are faster than large ones."""

from __future__ import annotations

import socket

__all__ = ["keep_in_cache"]

_BUFFER = 256 << 10


def keep_in_cache(sock: socket.socket) -> None:
    """Let a socket of the loopback interface have small buffers.

    Within one host a byte waits in a buffer for nothing but its reader.
    Buffers of 256 KiB stay in the cache of the processor between the copy in and the copy out; the kernel's own, of several
    MiB, do not, and halve the rate (docs/performance.md has the figures).
    On any other route large buffers are what keeps the line busy, so these keep the kernel's.
    """
    for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
        sock.setsockopt(socket.SOL_SOCKET, option, _BUFFER)
