"""Sending without a timeout of Python's, which makes of each send a wait and a write for every piece that fits the buffer."""

from __future__ import annotations

import contextlib
import math
import socket
import ssl
import struct
from collections.abc import Iterator

__all__ = ["waiting_in_kernel"]

_TIMEVAL = struct.Struct("@ll")


@contextlib.contextmanager
def waiting_in_kernel(sock: socket.socket, seconds: float) -> Iterator[None]:
    """Let the kernel wait for room to send, for ``seconds`` at most; raises TimeoutError.

    A blocking ``sendall`` is one call of the kernel, which goes on at once when the peer has taken something.
    A socket with TLS is left as it is, because it waits for other things too.
    """
    if isinstance(sock, ssl.SSLSocket):
        yield
        return
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _timeval(seconds))
    before = sock.gettimeout()
    sock.settimeout(None)
    try:
        yield
    except BlockingIOError:
        raise TimeoutError(f"the peer took nothing for {seconds:g} s") from None
    finally:
        sock.settimeout(before)


def _timeval(seconds: float) -> bytes:
    whole = math.floor(seconds)
    return _TIMEVAL.pack(whole, round((seconds - whole) * 1e6))
