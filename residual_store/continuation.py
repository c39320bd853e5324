"""Continuation: whether a server wants the body of a request that said ``Expect: 100-continue`` (RFC 9110, 10.1.1)."""

from __future__ import annotations

import select
import socket

__all__ = ["ASK_FIRST_BYTES", "may_send"]

ASK_FIRST_BYTES = 1 << 20
"""A body above this is announced first, so that one that is refused is not sent in vain."""

_SECONDS = 1.0


def may_send(sock: socket.socket) -> bool:
    """Whether the server wants the body: it says so, or says nothing for a while; false if it has answered already."""
    if not select.select([sock], [], [], _SECONDS)[0]:
        return True
    if b" 100 " not in sock.recv(16, socket.MSG_PEEK):
        return False
    read = b""
    while not read.endswith(b"\r\n\r\n"):
        if not (more := sock.recv(1)):
            raise ConnectionResetError("the server closed the connection")
        read += more
    return True
