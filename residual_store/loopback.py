"""Loopback: sockets within one host, where nothing is in the way but the reader."""

from __future__ import annotations

import contextlib
import ipaddress
import socket

__all__ = ["unpaced"]


def unpaced(sock: socket.socket) -> bool:
    """Let a socket of the loopback interface send as much as its reader has room for; false if it is another socket.

    A kernel may send with BBR, which takes the loopback interface for a line: it paces what goes out and has only a few
    pieces under way, so that sender and reader wake each other up all the time.
    Reno, which every Linux kernel has and lets everyone choose (tcp(7)), goes on until the reader's buffer is full.
    """
    if not _is_loopback(sock):
        return False
    # One that is closed by now tells its user so at the next read or write; uvloop's has a negative descriptor then.
    with contextlib.suppress(OSError, ValueError):
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, b"reno")
        return True
    return False


def _is_loopback(sock: socket.socket) -> bool:
    if sock.family not in (socket.AF_INET, socket.AF_INET6):
        return False
    with contextlib.suppress(OSError):
        return ipaddress.ip_address(sock.getpeername()[0]).is_loopback
    return False
