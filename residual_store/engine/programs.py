"""Programs: exported backward passes by fingerprint, each stored once."""

from __future__ import annotations

from typing import Protocol

from residual_store.bundle import digest_of
from residual_store.engine.root import Root
from residual_store.errors import DataLoss, NotFound
from residual_store.key import check_fingerprint

__all__ = ["DurablePrograms", "MemoryPrograms", "Programs"]


class Programs(Protocol):
    """Programs by fingerprint; the first one that is written under a fingerprint stays."""

    def write(self, fingerprint: str, program: bytes) -> None:
        """Store a program unless it is there already."""

    def read(self, fingerprint: str) -> bytes:
        """A program; raises `NotFound` or `DataLoss`."""

    def has(self, fingerprint: str) -> bool:
        """Whether there is a program under this fingerprint."""


class MemoryPrograms:
    """Programs in this process's memory."""

    def __init__(self) -> None:
        self._programs: dict[str, bytes] = {}

    def write(self, fingerprint: str, program: bytes) -> None:
        self._programs.setdefault(check_fingerprint(fingerprint), program)

    def read(self, fingerprint: str) -> bytes:
        if check_fingerprint(fingerprint) not in self._programs:
            raise _missing(fingerprint)
        return self._programs[fingerprint]

    def has(self, fingerprint: str) -> bool:
        return fingerprint in self._programs


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

    def has(self, fingerprint: str) -> bool:
        return self._root.exists(f"programs/{fingerprint}")


def _is_whole(found: bytes) -> bool:
    return digest_of(found[16:]) == found[:16]


def _missing(fingerprint: str) -> NotFound:
    return NotFound(f"there is no program {fingerprint}", fingerprint=fingerprint)
