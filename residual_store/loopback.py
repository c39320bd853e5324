"""Loopback: sockets within one host, for which the kernel's own buffers are too large or too small."""

from __future__ import annotations

import contextlib
import ipaddress
import socket

__all__ = ["fit_buffers"]

_IN_CACHE = 256 << 10
_WHOLE = 4 << 20
"""As much as the kernel grants; it holds half a body on each side."""


def fit_buffers(sock: socket.socket, nbytes: int) -> None:
    """Fit the buffers of a socket of the loopback interface to a body of ``nbytes``; any other socket keeps the kernel's.

    Within one host a byte waits in a buffer for nothing but its reader.
    Of a long body, what waits in 256 KiB stays in the cache of the processor between the copy in and the copy out; what
    waits in the kernel's own buffers, of several MiB, does not, and that halves the rate (docs/performance.md has the figures).
    A body of a few MiB rather waits as a whole: so its sender need not wait while its reader looks at what came first.
    On any other route large buffers are what keeps the line busy.
    """
    if nbytes <= _IN_CACHE or not _is_loopback(sock):
        return
    # One that is closed by now tells its user so at the next read or write; uvloop's has a negative descriptor then.
    with contextlib.suppress(OSError, ValueError):
        for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
            sock.setsockopt(socket.SOL_SOCKET, option, _WHOLE if nbytes <= 2 * _WHOLE else _IN_CACHE)


def _is_loopback(sock: socket.socket) -> bool:
    if sock.family not in (socket.AF_INET, socket.AF_INET6):
        return False
    with contextlib.suppress(OSError):
        return ipaddress.ip_address(sock.getpeername()[0]).is_loopback
    return False
