"""Programs: exported backward passes by fingerprint, each stored once."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Collection
from typing import Protocol

from residual_store.bundle import digest_of
from residual_store.engine.root import Root
from residual_store.errors import DataLoss, NotFound, StoreFull
from residual_store.key import check_fingerprint
from residual_store.manifest import Manifest

__all__ = ["DurablePrograms", "MemoryPrograms", "Programs"]


class Programs(Protocol):
    """Programs by fingerprint; the first one that is written under a fingerprint stays."""

    def write(self, fingerprint: str, program: bytes) -> None:
        """Store a program unless it is there already."""

    def read(self, fingerprint: str) -> bytes:
        """A program; raises `NotFound` or `DataLoss`."""

    def has(self, manifest: Manifest) -> bool:
        """Whether there is the program that a bundle names, and not another one under its fingerprint."""

    @property
    def held_bytes(self) -> int:
        """Bytes of the programs that are held in memory."""


class MemoryPrograms:
    """Programs in this process's memory, ``budget`` bytes of them at most.

    Where there is no room for one more, those make it that are not ``named`` by any bundle, the longest unused first.
    A put of a bundle asks with `has` after the bundle can be seen, so a client that hears yes need not send the program again.
    """

    def __init__(self, *, budget: int, named: Callable[[], Collection[str]]) -> None:
        self._budget = budget
        self._named = named
        self._programs: OrderedDict[str, bytes] = OrderedDict()
        self._lock = threading.Lock()

    def write(self, fingerprint: str, program: bytes) -> None:
        """Raises `StoreFull` if the programs that bundles name leave no room."""
        with self._lock:
            if self._find(check_fingerprint(fingerprint)) is None:
                self._make_room(len(program))
                self._programs[fingerprint] = program

    def read(self, fingerprint: str) -> bytes:
        with self._lock:
            found = self._find(check_fingerprint(fingerprint))
        if found is None:
            raise _missing(fingerprint)
        return found

    def has(self, manifest: Manifest) -> bool:
        with self._lock:
            found = self._find(manifest.fingerprint or "")
        return found is not None and digest_of(found) == manifest.program

    @property
    def held_bytes(self) -> int:
        with self._lock:
            return self._nbytes()

    def _nbytes(self) -> int:
        return sum(map(len, self._programs.values()))

    def _find(self, fingerprint: str) -> bytes | None:
        found = self._programs.get(fingerprint)
        if found is not None:
            self._programs.move_to_end(fingerprint)
        return found

    def _make_room(self, nbytes: int) -> None:
        free = self._budget - self._nbytes()
        if free >= nbytes:
            return
        named = self._named()
        for fingerprint in [one for one in self._programs if one not in named]:
            free += len(self._programs.pop(fingerprint))
            if free >= nbytes:
                return
        raise StoreFull(
            f"a program of {nbytes} bytes does not fit: those that bundles name leave {free} of {self._budget} bytes free, "
            "a quarter of host_bytes; delete bundles, raise host_bytes, or give the store a root",
            needed_bytes=nbytes,
            free_bytes=free,
        )


class DurablePrograms:
    """Programs below a root, one value ``programs/<fingerprint>`` each: an xxh3-128 and then the program."""

    def __init__(self, root: Root) -> None:
        self._root = root

    def write(self, fingerprint: str, program: bytes) -> None:
        path = f"programs/{check_fingerprint(fingerprint)}"
        found = self._root.read(path)
        if found is None or not _is_whole(found):
            self._root.write(path, digest_of(program) + program)

    def read(self, fingerprint: str) -> bytes:
        found = self._root.read(f"programs/{check_fingerprint(fingerprint)}")
        if found is None:
            raise _missing(fingerprint)
        if not _is_whole(found):
            raise DataLoss(f"the program {fingerprint} is damaged; offload once more to store it again")
        return found[16:]

    def has(self, manifest: Manifest) -> bool:
        fingerprint, program = manifest.fingerprint, manifest.program
        return bool(fingerprint and program) and self._root.starts(f"programs/{fingerprint}", program or b"")

    @property
    def held_bytes(self) -> int:
        return 0


def _is_whole(found: bytes) -> bool:
    return digest_of(found[16:]) == found[:16]


def _missing(fingerprint: str) -> NotFound:
    return NotFound(f"there is no program {fingerprint}", fingerprint=fingerprint)
