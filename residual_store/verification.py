"""Verification: the digests of leaves are checked while their bytes come in, as long as these are in the cache."""

from __future__ import annotations

from collections.abc import Generator

import xxhash

from residual_store.bundle import damaged
from residual_store.digest import digest_of
from residual_store.errors import InvalidFrame
from residual_store.leaf import Leaf
from residual_store.manifest import Manifest

__all__ = ["Verification"]

_BLOCK = 256 << 10


class Verification:
    """Checks one leaf area, which fills up from its start.

    >>> Verification(Manifest(), memoryview(b"")).finish()
    """

    def __init__(self, manifest: Manifest, area: memoryview) -> None:
        self._nbytes = len(area)
        # The steps know nothing of this object: a cycle would keep the memory until the garbage collector runs.
        self._steps = _steps(manifest, area)
        self._wanted = next(self._steps)

    def arrived(self, there: int) -> None:
        """Note that the first ``there`` bytes have come in; raises `InvalidFrame`, which names the leaf that is damaged."""
        if there >= self._wanted:
            self._wanted = self._steps.send(there)

    def finish(self) -> None:
        """Check what is left, with all bytes there; raises `InvalidFrame` as `arrived` does."""
        self.arrived(self._nbytes)


def _steps(manifest: Manifest, area: memoryview) -> Generator[int, int]:
    """Yields how many bytes must be there for the next step, and is sent how many are."""
    there = yield 0
    for leaf in manifest.leaves:
        if leaf.alias_of is not None:
            _compare(leaf, manifest.leaves[leaf.alias_of].digest)
            continue
        if leaf.is_shared:
            continue
        end = leaf.offset + leaf.nbytes
        if leaf.nbytes <= _BLOCK:
            while there < end:
                there = yield end
            _compare(leaf, digest_of(area[leaf.offset : end]))
            continue
        digest, start = xxhash.xxh3_128(), leaf.offset
        while start < end:
            while there < (wanted := min(start + _BLOCK, end)):
                there = yield wanted
            stop = min(there, end)
            digest.update(area[start:stop])
            start = stop
        _compare(leaf, digest.digest())
    while True:
        yield len(area) + 1


def _compare(leaf: Leaf, digest: bytes) -> None:
    if leaf.digest != digest:
        raise damaged(leaf, InvalidFrame)
