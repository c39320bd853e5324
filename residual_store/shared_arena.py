"""The shared arena: a server's segments in a file in memory, which clients on the same host map too.

::

    <base>/residual-store-<16 hex digits>/   mode 0700, of the server's user
        nonce    16 bytes: who can read them is on this host and is this user; locked for as long as the server lives
        arena    the table of idle blocks, and the segments, each behind a page that starts with a ticket and a claim

A client that reads holds a shared lock on the first byte of that page for as long as it uses the segment (`range_lock`), and
reads the ticket once it has the lock.
The server changes the ticket, under an exclusive lock, before it uses the block for anything else.
A client that fills an idle block holds the exclusive lock, and writes a claim that its put names.
Both the client that claims and the server that compares the claim hold the second byte for that moment, so the server takes
the block for the put of the client that filled it, or for none.
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
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from residual_store import block_head
from residual_store.arena import PAGE, NoRoom
from residual_store.block_head import CLAIMING, IN_USE
from residual_store.bundle import Payload
from residual_store.idle_table import TABLE_BYTES, IdleTable
from residual_store.place import BlockName, Place
from residual_store.range_lock import alone

__all__ = ["ARENA", "BASE", "NONCE", "SharedArena", "is_arena_name"]

BASE = Path("/dev/shm")  # noqa: S108 - a directory of mode 0700 is made in it
ARENA, NONCE = "arena", "nonce"
_NONCE_BYTES = 16
_STARTING_SECONDS = 60.0
_POPULATED_AT_ONCE = 16 << 20
_PREFIX = "residual-store-"
_NAME = re.compile(_PREFIX + r"[0-9a-f]{16}", re.ASCII)


def is_arena_name(name: str) -> bool:
    """Whether a directory can be that of an arena, by its name."""
    return _NAME.fullmatch(name) is not None


class SharedArena:
    """The server's end of a shared arena, with room for ``nbytes`` of blocks.

    What servers that are gone have left in ``base`` is removed first.
    Raises OSError if there is no memory file system, or no such range of addresses.
    """

    start = TABLE_BYTES

    def __init__(self, nbytes: int, *, base: Path = BASE) -> None:
        self.nbytes = TABLE_BYTES + nbytes
        _remove_stale(base)
        self.nonce = secrets.token_bytes(_NONCE_BYTES)
        self.directory, guard = _make_directory(base, self.nonce)
        self._guard: int | None = guard
        try:
            self._file, self._memory = _make_file(self.directory / ARENA, self.nbytes)
        except OSError:
            _remove(self.directory)
            os.close(guard)
            raise
        with contextlib.suppress(OSError):
            self._memory.madvise(mmap.MADV_HUGEPAGE)
        self._table = IdleTable(self._memory)

    def close(self) -> None:
        """Remove the files; who has mapped them keeps the memory until its views die."""
        if self._guard is not None:
            _remove(self.directory)
            os.close(self._guard)
            os.close(self._file)
            self._guard = None

    def view(self, start: int, nbytes: int) -> Payload:
        return np.frombuffer(self._memory, np.uint8, nbytes, start)

    def populate(self, start: int, nbytes: int) -> None:
        """Reserve the memory now: a write to a page that the file system has no room for would be a SIGBUS.

        Little by little, because the file is locked as long as a call of the kernel takes.
        """
        try:
            for piece in range(start, start + nbytes, _POPULATED_AT_ONCE):
                os.posix_fallocate(self._file, piece, min(_POPULATED_AT_ONCE, start + nbytes - piece))
        except OSError as error:
            self.forget(start, nbytes)
            raise NoRoom(f"{self.directory.parent} has no {nbytes} bytes left: {error.strerror}") from None

    def forget(self, start: int, nbytes: int) -> None:
        self._memory.madvise(mmap.MADV_REMOVE, start, nbytes)

    def place(self, start: int, nbytes: int) -> Place:
        ticket = block_head.write_ticket(self._memory, start)
        return Place(arena=self.directory.name, offset=start + PAGE, nbytes=nbytes, ticket=ticket)

    def reclaim(self, start: int, nbytes: int, run: str) -> bool:
        with self._alone(start + IN_USE) as unused:
            if unused:
                block_head.clear(self._memory, start)
                self._table.offer(start, nbytes, run)
            return unused

    def void(self, place: Place) -> None:
        start = place.offset - PAGE
        if block_head.ticket_of(self._file, start) == place.ticket:
            block_head.clear(self._memory, start)

    def withdraw(self, start: int) -> bool:
        with self._alone(start + IN_USE) as unused:
            if unused:
                self._table.withdraw(start)
            return unused

    def taken(self, block: BlockName) -> bool:
        if block.arena != self.directory.name:
            return False
        with self._alone(block.start + CLAIMING) as settled:
            is_taken = settled and block_head.has_claim(self._memory, block.start, block.claim)
            if is_taken:
                self._table.withdraw(block.start)
            return is_taken

    def _alone(self, offset: int) -> contextlib.AbstractContextManager[bool]:
        """Whether no other process holds a byte; none begins to while this lasts."""
        return contextlib.nullcontext(False) if self._guard is None else alone(self._file, offset)


def _make_directory(base: Path, nonce: bytes) -> tuple[Path, int]:
    """A new directory and the descriptor that guards it; it gets its name once it is guarded."""
    name = _PREFIX + secrets.token_hex(8)
    hidden = base / f".{name}"
    hidden.mkdir(mode=0o700)
    guard = os.open(hidden / NONCE, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    fcntl.flock(guard, fcntl.LOCK_EX)
    os.write(guard, nonce)
    return hidden.rename(base / name), guard


def _make_file(path: Path, nbytes: int) -> tuple[int, mmap.mmap]:
    """The arena's file, whose length nobody changes, and its memory."""
    descriptor = os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    try:
        os.ftruncate(descriptor, nbytes)
        os.posix_fallocate(descriptor, 0, TABLE_BYTES)
        return descriptor, mmap.mmap(descriptor, nbytes)
    except (OSError, OverflowError) as error:
        os.close(descriptor)
        raise (
            error if isinstance(error, OSError) else OSError(errno.EFBIG, os.strerror(errno.EFBIG))
        ) from None


def _remove(directory: Path) -> None:
    """Remove an arena, its memory first: as long as the nonce is there, what is left is found and removed later."""
    (directory / ARENA).unlink(missing_ok=True)
    shutil.rmtree(directory, ignore_errors=True)


def _remove_stale(base: Path) -> None:
    for directory in _own(base):
        try:
            guard = os.open(directory / NONCE, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError:
            # Who removed the rest was killed before it came to this.
            with contextlib.suppress(OSError):
                directory.rmdir()
            continue
        with contextlib.suppress(BlockingIOError):
            fcntl.flock(guard, fcntl.LOCK_EX | fcntl.LOCK_NB)
            _remove(directory)
        os.close(guard)


def _own(base: Path) -> Iterator[Path]:
    """The arenas of this user, except those that have no name yet because their servers are just starting."""
    for directory in base.iterdir():
        with contextlib.suppress(OSError):
            found, is_hidden = directory.lstat(), directory.name.startswith(".")
            if not is_arena_name(directory.name.removeprefix(".")) or found.st_uid != os.getuid():
                continue
            if not is_hidden or time.time() - found.st_mtime > _STARTING_SECONDS:
                yield directory
