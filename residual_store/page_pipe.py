"""The page pipe: a socket sends the pages of a body from where they lie.

To write to a socket is to copy into the kernel, and whoever reads copies out of it.
Within one host the first copy can go: vmsplice(2) puts references to pages into a pipe, and splice(2) moves them on to the
socket, so that the reader copies from the memory of the writer.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import socket
from typing import Any

import numpy as np

from residual_store.closing import ClosedAtExit

__all__ = ["PagePipe"]

_WORTH_IT = 1 << 20
"""Bytes of a piece, and of a pipe; through a shorter pipe the reader waits too often."""

_UNABLE = (errno.ENOSYS, errno.EPERM, errno.EINVAL, errno.EFAULT, errno.EMFILE, errno.ENFILE)
"""What a kernel answers that does not know these calls, or forbids them, or not for this socket or memory, or has no pipe left."""


class PagePipe(ClosedAtExit):
    """Sends to a socket of the loopback interface.

    The peer reads what stands in that memory when it reads, so it must stay as it is until the peer has answered.
    If it does not, because the caller gave up, the peer has to find out by a digest that came before, which has to be what
    it was: so only arrays go by reference, and a ``bytes``, which is made for one send and freed after it, is copied.
    Where the kernel cannot send by reference, everything is.

    >>> ours, theirs = socket.socketpair()
    >>> with ours, theirs, PagePipe(ours) as pipe:
    ...     pipe.send(memoryview(b"residual"))
    8
    """

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._ends: list[int] = []
        self._vmsplice: Any = None
        self._is_able = True
        self._waiting = 0
        """How many bytes from the start of what is to be sent the pipe refers to."""

    def close(self) -> None:
        self._waiting = 0
        while self._ends:
            os.close(self._ends.pop())

    def send(self, data: memoryview) -> int:
        """Send from the start of ``data``, and how many bytes, as `socket.socket.send` does and with its errors.

        After a call that took fewer bytes, or raised BlockingIOError, the next one must be with those that are left.
        """
        if self._waiting or (self._is_able and len(data) >= _WORTH_IT and isinstance(data.obj, np.ndarray)):
            try:
                return self._send_pages(data)
            except OSError as error:
                if error.errno not in _UNABLE:
                    raise
                self._is_able = False
                self.close()
        return self._sock.send(data)

    def _send_pages(self, data: memoryview) -> int:
        if not self._ends:
            self._open()
        source, target = self._ends
        if not self._waiting:
            self._waiting = self._refer(target, data)
        more = os.SPLICE_F_MORE if len(data) > self._waiting else 0
        moved = os.splice(source, self._sock.fileno(), self._waiting, flags=more)
        self._waiting -= moved
        return moved

    def _open(self) -> None:
        self._vmsplice = getattr(ctypes.CDLL(None, use_errno=True), "vmsplice", None)
        if self._vmsplice is None:
            raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
        self._vmsplice.restype = ctypes.c_ssize_t
        self._ends = list(os.pipe())
        # An unprivileged user may have 64 MiB of such pipes (pipe(7)), and is told EPERM beyond that.
        fcntl.fcntl(self._ends[1], fcntl.F_SETPIPE_SZ, _WORTH_IT)

    def _refer(self, pipe: int, data: memoryview) -> int:
        """How many bytes from the start of ``data`` the empty ``pipe`` refers to now."""
        vector = (ctypes.c_size_t * 2)(np.frombuffer(data, np.uint8).ctypes.data, len(data))
        taken = int(self._vmsplice(pipe, ctypes.byref(vector), ctypes.c_ulong(1), ctypes.c_uint(0)))
        if taken < 0:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
        return taken
