"""Holding: what this process has of the residuals of a VJP object, and so stores."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
import numpy.typing as npt

from residual_client.sharding import own_blocks
from residual_client.shards import Shards
from residual_client.transfer import Residual
from residual_store.blocks import Start
from residual_store.bundle import Bundle
from residual_store.manifest import Manifest
from residual_store.parts import Part, Piece, part_bundle

__all__ = ["Holding", "Places"]

type Host = npt.NDArray[np.generic]


@dataclass(frozen=True, kw_only=True)
class Places:
    """Where the arrays of a holding belong: each one's leaf, and where it starts in that.

    With a ``part`` they are pieces of leaves that several processes hold together, else whole leaves.
    ``firsts`` has for each leaf the first one that is the same array, and whose bytes are those of both.
    """

    starts: Sequence[tuple[int, Start]]
    firsts: Sequence[int]
    part: Part | None

    def bundle(self, manifest: Manifest, hosts: Sequence[Host]) -> Bundle:
        """The bundle of the leaves in ``manifest``, or a part of it, with these values of the arrays."""
        if self.part is None:
            of_leaf = {leaf: host for (leaf, _), host in zip(self.starts, hosts, strict=True)}
            return Bundle.encoded(
                manifest, [of_leaf[first] for first in self.firsts], identities=list(self.firsts)
            )
        pieces = [
            Piece(leaf=leaf, start=start, values=host)
            for (leaf, start), host in zip(self.starts, hosts, strict=True)
        ]
        return part_bundle(manifest, pieces, identities=self.firsts)


@dataclass(frozen=True, kw_only=True)
class Holding:
    """Arrays, each once, and where they belong."""

    arrays: Sequence[Shards]
    places: Places

    @classmethod
    def of(cls, residuals: Sequence[Residual], part: Part | None = None) -> Self:
        """All residuals, which this process has alone, or those blocks of them that are its ``part``."""
        first = {id(residual.value): index for index, residual in reversed(list(enumerate(residuals)))}
        firsts = [first[id(residual.value)] for residual in residuals]
        arrays, starts = [], []
        for index in dict.fromkeys(firsts):
            for start, array in _held(residuals[index], whole=part is None):
                arrays.append(array)
                starts.append((index, start))
        return cls(arrays=arrays, places=Places(starts=starts, firsts=firsts, part=part))

    @property
    def nbytes(self) -> int:
        """The host memory that a snapshot of it needs."""
        return sum(array.nbytes for array in self.arrays)


def _held(residual: Residual, *, whole: bool) -> list[tuple[Start, Shards]]:
    if whole:
        array = Shards.of(residual)
        return [((0,) * len(array.shape), array)]
    return [
        (start, Shards(path=residual.path, shape=block.shape, blocks={(0,) * block.ndim: block}))
        for start, block in own_blocks(residual.value)
    ]
