"""Verification: the digests of leaves are checked while their bytes come in, as long as these are in the cache."""

from __future__ import annotations

from collections.abc import Iterator

import xxhash

from residual_store.bundle import damaged
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
        self._area = area
        self._there = 0
        self._wanted = 0
        self._steps = self._check(manifest)
        self.arrived(0)

    def arrived(self, there: int) -> None:
        """Note that the first ``there`` bytes have come in; raises `InvalidFrame`, which names the leaf that is damaged."""
        self._there = there
        while self._wanted <= self._there:
            if (wanted := next(self._steps, None)) is None:
                return
            self._wanted = wanted

    def finish(self) -> None:
        """Check what is left, with all bytes there; raises `InvalidFrame` as `arrived` does."""
        self.arrived(len(self._area))

    def _check(self, manifest: Manifest) -> Iterator[int]:
        """Yields how many bytes must be there for the next step."""
        for leaf in manifest.leaves:
            if leaf.alias_of is not None:
                _compare(leaf, manifest.leaves[leaf.alias_of].digest)
                continue
            end = leaf.offset + leaf.nbytes
            digest = xxhash.xxh3_128()
            for start in range(leaf.offset, end, _BLOCK):
                stop = min(start + _BLOCK, end)
                if stop > self._there:
                    yield stop
                digest.update(self._area[start:stop])
            _compare(leaf, digest.digest())
        self._wanted = len(self._area) + 1


def _compare(leaf: Leaf, digest: bytes) -> None:
    if leaf.digest != digest:
        raise damaged(leaf, InvalidFrame)
