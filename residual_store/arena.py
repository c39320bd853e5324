"""Arenas: the address range that a segment pool cuts its blocks from.

An arena is mapped once, as a whole, and has no memory behind it until a block is populated.
So a block that was used before is used again without a page fault, which costs six to ten times what a copy costs.
"""

from __future__ import annotations

import bisect
import contextlib
import mmap
from typing import Protocol

import numpy as np

from residual_store.bundle import Payload
from residual_store.errors import ResidualStoreError
from residual_store.place import BlockName, Place

__all__ = ["PAGE", "AddressSpace", "Arena", "NoRoom", "PrivateArena", "arena_bytes", "private_arena"]

PAGE = mmap.PAGESIZE
_MAP_NORESERVE = 0x4000  # mmap(2); Python's mmap has it since 3.13


class NoRoom(ResidualStoreError):
    """A segment does not fit just now; the store makes room or answers with `StoreFull` or `Busy`."""


class Arena(Protocol):
    """A range of addresses, in bytes from its start."""

    @property
    def start(self) -> int:
        """Where the blocks begin."""

    @property
    def nbytes(self) -> int:
        """Length of the range, with or without memory behind it."""

    def view(self, start: int, nbytes: int) -> Payload:
        """The bytes of a block as a new array, the base of every view of it."""

    def populate(self, start: int, nbytes: int) -> None:
        """Put memory behind a block; raises `NoRoom` if the machine has none."""

    def forget(self, start: int, nbytes: int) -> None:
        """Give the memory behind a block back to the machine."""

    def place(self, start: int, nbytes: int) -> Place | None:
        """A fresh place of the segment in the block at ``start``, if other processes can reach it."""

    def reclaim(self, start: int, nbytes: int, run: str) -> bool:
        """End the validity of all places of a block, and let clients take it for their puts of a run.

        False, and nothing is done, while another process uses it.
        """

    def void(self, place: Place) -> None:
        """End the validity of a place: nobody finds the segment there any more, and who uses it already may go on."""

    def withdraw(self, start: int) -> bool:
        """Offer a block no more; false, and nothing is done, while a client has it."""

    def taken(self, block: BlockName) -> bool:
        """Whether that is an offered block which a client has claimed so; if so, it is offered no more."""

    def close(self) -> None:
        """Let go of the range; views stay valid."""


class PrivateArena:
    """An arena of anonymous memory, with huge pages where the kernel offers them."""

    start = 0

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
        self._memory = mmap.mmap(-1, nbytes, flags=flags)
        with contextlib.suppress(OSError):
            self._memory.madvise(mmap.MADV_HUGEPAGE)

    def view(self, start: int, nbytes: int) -> Payload:
        return np.frombuffer(self._memory, np.uint8, nbytes, start)

    def populate(self, start: int, nbytes: int) -> None:
        """The first touch of each page puts memory behind it."""

    def forget(self, start: int, nbytes: int) -> None:
        self._memory.madvise(mmap.MADV_DONTNEED, start, nbytes)

    def place(self, start: int, nbytes: int) -> Place | None:
        return None

    def reclaim(self, start: int, nbytes: int, run: str) -> bool:
        return True

    def void(self, place: Place) -> None:
        """There are no places in this arena."""

    def withdraw(self, start: int) -> bool:
        return True

    def taken(self, block: BlockName) -> bool:
        return False

    def close(self) -> None:
        """The memory goes with the last view."""


def arena_bytes(total: int) -> int:
    """The length of an arena for a pool: twice the total, so that blocks of all sizes find room."""
    return max(2 * total // PAGE, 1) * PAGE


def private_arena(total: int) -> Arena | None:
    """An arena of this process for a pool; None where the machine allows no such range."""
    try:
        return PrivateArena(arena_bytes(total))
    except (OSError, ValueError, OverflowError):
        return None


class AddressSpace:
    """Which parts of a range are taken, first fit.

    >>> space = AddressSpace(100)
    >>> space.take(60), space.take(60)
    (0, None)
    >>> space.give(0, 60)
    >>> space.take(100)
    0
    """

    def __init__(self, nbytes: int, *, start: int = 0) -> None:
        self._free = [(start, nbytes - start)]

    @classmethod
    def of(cls, arena: Arena | None) -> AddressSpace:
        """All of an arena; nothing without one."""
        return cls(0) if arena is None else cls(arena.nbytes, start=arena.start)

    def take(self, nbytes: int) -> int | None:
        """The start of a part that nobody has, or None."""
        for index, (start, size) in enumerate(self._free):
            if size >= nbytes:
                rest = [(start + nbytes, size - nbytes)] if size > nbytes else []
                self._free[index : index + 1] = rest
                return start
        return None

    def give(self, start: int, nbytes: int) -> None:
        """Take back a part, and join it with what is free beside it."""
        index = bisect.bisect(self._free, (start, 0))
        if index < len(self._free) and start + nbytes == self._free[index][0]:
            nbytes += self._free.pop(index)[1]
        if index and sum(self._free[index - 1]) == start:
            index -= 1
            before, size = self._free.pop(index)
            start, nbytes = before, size + nbytes
        self._free.insert(index, (start, nbytes))
