"""Locks on one byte of a file, shared or exclusive, that end with the process that holds them, however it ends.

They are open file description locks (fcntl(2), F_OFD_SETLK): two openings of a file are two holders, even in one process.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import struct
from collections.abc import Iterator

__all__ = ["alone", "lock_shared", "try_lock_exclusive"]

_FLOCK = struct.Struct("@hhqqi4x")


def _set(descriptor: int, kind: int, offset: int) -> None:
    fcntl.fcntl(descriptor, fcntl.F_OFD_SETLK, _FLOCK.pack(kind, os.SEEK_SET, offset, 1, 0))


def lock_shared(descriptor: int, offset: int) -> bool:
    """Hold the byte at ``offset`` together with others; false while somebody holds it alone."""
    return _attempt(descriptor, fcntl.F_RDLCK, offset)


def try_lock_exclusive(descriptor: int, offset: int) -> bool:
    """Hold the byte at ``offset`` alone; false while somebody else holds it."""
    return _attempt(descriptor, fcntl.F_WRLCK, offset)


@contextlib.contextmanager
def alone(descriptor: int, offset: int) -> Iterator[bool]:
    """Whether the byte at ``offset`` is held alone for as long as this lasts; if not, somebody else holds it."""
    held = try_lock_exclusive(descriptor, offset)
    try:
        yield held
    finally:
        if held:
            _set(descriptor, fcntl.F_UNLCK, offset)


def _attempt(descriptor: int, kind: int, offset: int) -> bool:
    try:
        _set(descriptor, kind, offset)
    except (BlockingIOError, PermissionError):
        return False
    return True
