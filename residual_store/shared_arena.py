"""The shared arena: a server's segments in a file in memory, which clients on the same host map too.

::

    <base>/residual-store-<16 hex digits>/   mode 0700, of the server's user
        nonce    16 bytes: who can read them is on this host and is this user; locked for as long as the server lives
        arena    the segments, each behind a page of its own that starts with the ticket of the segment

A client holds a shared lock on the first byte of that page for as long as it uses the segment (`range_lock`), and reads the
ticket once it has the lock.
The server changes the ticket, under an exclusive lock, before it uses the block for anything else.
So neither a slow client nor a dead one can read or write a segment that has become another bundle's.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
import re
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from residual_store.arena import PAGE, NoRoom
from residual_store.bundle import Payload
from residual_store.place import Place
from residual_store.range_lock import try_lock_exclusive, unlock

__all__ = ["ARENA", "BASE", "NONCE", "TICKET_BYTES", "SharedArena", "is_arena_name"]

BASE = Path("/dev/shm")  # noqa: S108 - a directory of mode 0700 is made in it
ARENA, NONCE = "arena", "nonce"
TICKET_BYTES = 16

_PREFIX = "residual-store-"
_NAME = re.compile(_PREFIX + r"[0-9a-f]{16}", re.ASCII)


def is_arena_name(name: str) -> bool:
    """Whether a directory can be that of an arena, by its name."""
    return _NAME.fullmatch(name) is not None


class SharedArena:
    """The server's end of a shared arena; raises OSError if there is no memory file system.

    What servers that are gone have left in ``base`` is removed first.
    """

    def __init__(self, nbytes: int, *, base: Path = BASE) -> None:
        self.nbytes = nbytes
        _remove_stale(base)
        self.nonce = secrets.token_bytes(TICKET_BYTES)
        self.directory, self._guard = _make_directory(base, self.nonce)
        try:
            self._file = os.open(self.directory / ARENA, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
            os.ftruncate(self._file, nbytes)
            self._memory = mmap.mmap(self._file, nbytes)
        except OSError:
            shutil.rmtree(self.directory, ignore_errors=True)
            raise
        with contextlib.suppress(OSError):
            self._memory.madvise(mmap.MADV_HUGEPAGE)

    def close(self) -> None:
        """Remove the files; who has mapped them keeps the memory until its views die."""
        if self._guard is not None:
            shutil.rmtree(self.directory, ignore_errors=True)
            os.close(self._guard)
            os.close(self._file)
            self._guard = None

    def view(self, start: int, nbytes: int) -> Payload:
        return np.frombuffer(self._memory, np.uint8, nbytes, start)

    def populate(self, start: int, nbytes: int) -> None:
        """Reserve the memory now: a write to a page that the file system has no room for would be a SIGBUS."""
        try:
            os.posix_fallocate(self._file, start, nbytes)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.ENOMEM):
                raise
            self.forget(start, nbytes)
            raise NoRoom(f"{self.directory.parent} has no {nbytes} bytes left") from None

    def forget(self, start: int, nbytes: int) -> None:
        self._memory.madvise(mmap.MADV_REMOVE, start, nbytes)

    def place(self, start: int, nbytes: int) -> Place:
        ticket = secrets.token_bytes(TICKET_BYTES)
        self._memory[start : start + TICKET_BYTES] = ticket
        return Place(arena=self.directory.name, offset=start + PAGE, nbytes=nbytes, ticket=ticket.hex())

    def reclaim(self, start: int) -> bool:
        if self._guard is None or not try_lock_exclusive(self._file, start):
            return False
        self._memory[start : start + TICKET_BYTES] = bytes(TICKET_BYTES)
        unlock(self._file, start)
        return True


def _make_directory(base: Path, nonce: bytes) -> tuple[Path, int | None]:
    """A new directory and the descriptor that guards it; it gets its name once it is guarded."""
    name = _PREFIX + secrets.token_hex(8)
    hidden = base / f".{name}"
    hidden.mkdir(mode=0o700)
    guard = os.open(hidden / NONCE, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    fcntl.flock(guard, fcntl.LOCK_EX)
    os.write(guard, nonce)
    return hidden.rename(base / name), guard


def _remove_stale(base: Path) -> None:
    for directory in _own(base):
        try:
            guard = os.open(directory / NONCE, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError:
            continue
        with contextlib.suppress(BlockingIOError):
            fcntl.flock(guard, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(directory, ignore_errors=True)
        os.close(guard)


def _own(base: Path) -> Iterator[Path]:
    for directory in base.iterdir():
        with contextlib.suppress(OSError):
            if is_arena_name(directory.name) and directory.lstat().st_uid == os.getuid():
                yield directory
