"""The idle table: the blocks of a shared arena that any client may take for its next put.

The table is at the start of the arena's file, and only the server writes it.
A client that wants a block takes the exclusive lock of the block first, then reads the entry again and writes its claim: the
server adds and removes an entry only while it has that lock, or while it compares the claim with that of a put.
So taking a block costs no request, and a client that dies with one has taken nothing.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator

import numpy as np

from residual_store.digest import digest_of

__all__ = ["TABLE_BYTES", "IdleTable"]

TABLE_BYTES = 64 << 10

_ENTRY = np.dtype([("start", "<u8"), ("nbytes", "<u8"), ("run", "V16")])


class IdleTable:
    """Up to 2,048 entries: where a block starts, how long it is, and the digest of the run whose bytes it may still hold."""

    def __init__(self, memory: mmap.mmap) -> None:
        self._entries = np.frombuffer(memory, _ENTRY, TABLE_BYTES // _ENTRY.itemsize)

    def offer(self, start: int, nbytes: int, run: str) -> None:
        """Add a block; without a free entry it is not offered."""
        free = np.flatnonzero(self._entries["start"] == 0)
        if len(free):
            entry = self._entries[free[0]]
            entry["nbytes"], entry["run"] = nbytes, np.void(_digest(run))
            # Last, because it makes the entry one.
            entry["start"] = start

    def withdraw(self, start: int) -> None:
        """Take a block out again, if it is in the table."""
        self._entries["start"][self._entries["start"] == start] = 0

    def matching(self, nbytes: int, largest: int, run: str) -> Iterator[int]:
        """The starts of the blocks of a run that have from ``nbytes`` to ``largest`` bytes."""
        sizes = self._entries["nbytes"]
        for index in np.flatnonzero((sizes >= nbytes) & (sizes <= largest)):
            entry = self._entries[index]
            # Read once: the server may withdraw the block at any moment, and then it is 0, where the table is.
            start = int(entry["start"])
            if start and entry["run"].tobytes() == _digest(run):
                yield start

    def has(self, start: int, nbytes: int, run: str) -> bool:
        """Whether a block is there, and is what it seemed to be."""
        return start > 0 and any(
            entry["nbytes"] >= nbytes and entry["run"].tobytes() == _digest(run)
            for entry in self._entries[self._entries["start"] == start]
        )


def _digest(run: str) -> bytes:
    return digest_of(run.encode())
