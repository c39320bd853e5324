"""A neighbour: a server on the same host, whose shared arena this process has mapped."""

from __future__ import annotations

import fcntl
import mmap
import os
import stat
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from residual_store import block_head
from residual_store.arena import PAGE
from residual_store.block_head import CLAIMING, IN_USE
from residual_store.bundle import Payload
from residual_store.idle_table import IdleTable
from residual_store.place import BlockName, Place
from residual_store.range_lock import alone, lock_shared, try_lock_exclusive
from residual_store.shared_arena import ARENA, BASE, NONCE, is_arena_name
from residual_store.size_class import largest_for, size_class

__all__ = ["Neighbour", "NotShared"]

_MOST_BORROWED = 256
_ELSEWHERE = "the server is on another host, or in a container with a /dev/shm of its own"


class NotShared(Exception):
    """Why this process and a server share no memory, in one line."""


class Neighbour:
    """The client's end of a `residual_store.shared_arena.SharedArena`.

    ``described`` is what the server says of its arena.
    What it says is believed only of a directory in memory that belongs to this user and nobody else can enter: a server
    must not make this process map, or write to, any other file.

    Raises `NotShared`.
    """

    def __init__(self, described: Mapping[str, Any] | None, *, base: Path = BASE) -> None:
        if described is None:
            raise NotShared("the server shares no memory")
        directory, nonce = _checked(described, base)
        self.name = directory.name
        self._path = directory / ARENA
        self._borrowed: set[int] = set()
        self._filling: dict[BlockName, int] = {}
        try:
            _check_owner(directory)
            if (directory / NONCE).read_bytes().hex() != nonce:
                raise NotShared(_ELSEWHERE)
            self._guard = os.open(directory / NONCE, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
            weakref.finalize(self, os.close, self._guard)
            self._own, self._views = _map(self._path)
            self._table = IdleTable(self._views)
        except FileNotFoundError:
            raise NotShared(_ELSEWHERE) from None
        except (OSError, ValueError) as error:
            raise NotShared(f"the server's memory cannot be mapped: {error}") from None

    @property
    def lives(self) -> bool:
        """Whether the server still has this arena: the kernel ends its lock with it."""
        try:
            fcntl.flock(self._guard, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        fcntl.flock(self._guard, fcntl.LOCK_UN)
        return False

    def borrow(self, place: Place) -> Payload | None:
        """The bytes of a segment, which stays what it is until their last view dies; None if it is something else by now.

        They are read-only by the page tables.
        """
        start = place.offset - PAGE
        if place.arena != self.name or start < 0 or not 0 < place.nbytes <= len(self._views) - place.offset:
            return None
        held = self._hold(start)
        if held is None:
            return None
        ticket = block_head.ticket_of(held, start)
        if ticket != place.ticket or not int(ticket, 16):
            self._let_go(held)
            return None
        return self._view(self._views, place.offset, place.nbytes, held)

    def take(self, nbytes: int, run: str) -> tuple[BlockName, Payload] | None:
        """An idle block for the put of a bundle, and its memory; None if there is none to take.

        It is this process's until the last view of the memory dies.
        """
        for start in self._table.matching(nbytes, largest_for(size_class(nbytes)), run):
            held = self._hold(start, to_fill=True)
            if held is None:
                continue
            if (claim := self._claimed(held, start, nbytes, run)) is not None:
                block, memory = (
                    BlockName(self.name, start, claim),
                    self._view(self._own, start + PAGE, nbytes, held),
                )
                self._filling[block] = held
                weakref.finalize(memory, self._filling.pop, block, None).atexit = False
                return block, memory
            self._let_go(held)
        return None

    def _claimed(self, descriptor: int, start: int, nbytes: int, run: str) -> str | None:
        """The claim on a block; None if the block is not what it seemed to be, or is being given to the put of another."""
        with alone(descriptor, start + CLAIMING) as settled:
            if not settled or not self._table.has(start, nbytes, run):
                return None
            return block_head.write_claim(self._own, start)

    def share(self, block: BlockName) -> None:
        """Let others read a block that has been filled and put, while this process still has its memory."""
        if (held := self._filling.get(block)) is not None:
            lock_shared(held, block.start + IN_USE)

    def forgetting(self, block: BlockName) -> Callable[[int, int], None]:
        """A function that takes a part of a block, which has been filled, out of this process's page tables.

        The bytes stay where they are; this process no longer counts them as resident, and the next put into the block is
        slower, because each page is looked up again.
        """
        area = block.start + PAGE

        def forget(start: int, stop: int) -> None:
            first = (area + start) // PAGE * PAGE
            self._own.madvise(mmap.MADV_DONTNEED, first, area + stop - first)

        return forget

    def _view(self, memory: mmap.mmap, offset: int, nbytes: int, held: int) -> Payload:
        view = np.frombuffer(memory, np.uint8, nbytes, offset)
        weakref.finalize(view, self._let_go, held).atexit = False
        return view

    def _hold(self, start: int, *, to_fill: bool = False) -> int | None:
        """A descriptor that holds the lock of a segment; the lock ends when it is closed."""
        if len(self._borrowed) >= _MOST_BORROWED:
            return None
        try:
            descriptor = os.open(self._path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError:
            return None
        lock = try_lock_exclusive if to_fill else lock_shared
        if not lock(descriptor, start + IN_USE):
            os.close(descriptor)
            return None
        self._borrowed.add(descriptor)
        return descriptor

    def _let_go(self, descriptor: int) -> None:
        self._borrowed.discard(descriptor)
        os.close(descriptor)


def _checked(described: Mapping[str, Any], base: Path) -> tuple[Path, str]:
    """The directory and the nonce of an arena."""
    try:
        directory, nonce = Path(described["directory"]), str(described["nonce"])
    except (LookupError, TypeError):
        raise NotShared("what the server says of its memory is not understood") from None
    if directory.parent != base or not is_arena_name(directory.name):
        raise NotShared(f"the server's segments are not in {base}")
    return directory, nonce


def _check_owner(directory: Path) -> None:
    found = directory.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise NotShared("the server runs as another user")


def _map(path: Path) -> tuple[mmap.mmap, mmap.mmap]:
    """The arena twice: to write to, and to read from only."""
    descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        nbytes = os.fstat(descriptor).st_size
        return mmap.mmap(descriptor, nbytes), mmap.mmap(descriptor, nbytes, prot=mmap.PROT_READ)
    finally:
        os.close(descriptor)
