"""Blocks: an array that lies in memory in several pieces, put together where it is wanted."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from residual_store.digest import Payload
from residual_store.repetition import is_constant

__all__ = ["Blocks", "Start"]

type Host = npt.NDArray[np.generic]
type Start = tuple[int, ...]
"""Where a block starts in each dimension of the whole."""


@dataclass(frozen=True, kw_only=True)
class Blocks:
    """An array of this ``dtype`` and ``shape`` in blocks, of which none overlaps another.

    >>> halves = {(0,): np.zeros(2, np.uint8), (2,): np.ones(2, np.uint8)}
    >>> Blocks(dtype=np.dtype(np.uint8), shape=(4,), blocks=halves).gathered()
    array([0, 0, 1, 1], dtype=uint8)
    """

    dtype: np.dtype[np.generic]
    shape: tuple[int, ...]
    blocks: Mapping[Start, Host]

    @property
    def nbytes(self) -> int:
        """Bytes of the whole."""
        return math.prod(self.shape) * self.dtype.itemsize

    def are_tiles(self) -> bool:
        """Whether the blocks cover every element once: they are of one shape, start at its multiples, and are all there."""
        shapes = {block.shape for block in self.blocks.values()}
        if len(shapes) != 1 or any(len(start) != len(self.shape) for start in self.blocks):
            return False
        (shape,) = shapes
        if len(shape) != len(self.shape) or not all(shape):
            return False
        if any(whole % size for size, whole in zip(shape, self.shape, strict=True)):
            return False
        count = math.prod(whole // size for size, whole in zip(shape, self.shape, strict=True))
        return len(self.blocks) == count and all(
            0 <= first < whole and not first % size
            for start in self.blocks
            for first, size, whole in zip(start, shape, self.shape, strict=True)
        )

    def constant(self) -> Payload | None:
        """The bytes of the element that is all over the whole, if there is one."""
        firsts = [_first(block).reshape(-1).view(np.uint8) for block in self.blocks.values()]
        if any(first.tobytes() != firsts[0].tobytes() for first in firsts):
            return None
        return firsts[0] if all(map(_is_constant, self.blocks.values())) else None

    def fill(self, target: Payload) -> None:
        """Write the bytes of the whole, in C order."""
        # numpy copies words at the speed of memory, and a bfloat16 one at a time.
        word = np.dtype(f"u{self.dtype.itemsize}") if self.dtype.itemsize <= 8 else self.dtype
        whole = target.view(word).reshape(self.shape)
        for start, block in self.blocks.items():
            where = tuple(slice(first, first + size) for first, size in zip(start, block.shape, strict=True))
            whole[where] = block.view(word)

    def gathered(self) -> Host:
        """The whole as one array in memory of its own."""
        target = np.empty(self.nbytes, np.uint8)
        self.fill(target)
        return target.view(self.dtype).reshape(self.shape)


def _first(block: Host) -> Host:
    """The first element alone; flattening a broadcast array would make all of it."""
    return np.ascontiguousarray(block[(slice(1),) * block.ndim])


def _is_constant(block: Host) -> bool:
    if block.size == 1 or not any(block.strides):
        return True
    if not block.flags.c_contiguous:
        return False
    return is_constant(block.reshape(-1).view(np.uint8), block.itemsize)
