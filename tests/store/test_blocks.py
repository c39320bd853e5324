"""Arrays in several pieces, put together where they are wanted."""

from __future__ import annotations

import numpy as np
import pytest

from residual_store.blocks import Blocks
from residual_store.dtypes import DTYPES
from tests.store.bundles import values_of


def _cut(name: str) -> tuple[np.ndarray, Blocks]:
    whole = values_of(name, (4, 6), seed=5)
    starts = [(row, column) for row in (2, 0) for column in (0, 3)]
    blocks = {(row, column): whole[row : row + 2, column : column + 3].copy() for row, column in starts}
    return whole, Blocks(dtype=whole.dtype, shape=whole.shape, blocks=blocks)


@pytest.mark.parametrize("name", [name for name in DTYPES if name != "float0"])
def test_blocks_become_the_whole(name: str) -> None:
    """Put together in memory of their own or of somebody else, they have the bytes of the whole."""
    whole, blocks = _cut(name)
    gathered, target = blocks.gathered(), np.full(whole.nbytes, 255, np.uint8)
    blocks.fill(target)
    assert (gathered.dtype, gathered.shape) == (whole.dtype, whole.shape)
    assert gathered.tobytes() == target.tobytes() == whole.tobytes()


def test_a_constant_is_found_in_blocks() -> None:
    """One element all over, and not when one block or one element is another."""
    halves = {(0,): np.full(9, 3.0), (9,): np.full(9, 3.0)}
    constant = Blocks(dtype=np.dtype(float), shape=(18,), blocks=halves).constant()
    assert constant is not None
    assert constant.tobytes() == np.float64(3).tobytes()
    for place in (0, 4, 8):
        other = np.full(9, 3.0)
        other[place] = 4
        changed = Blocks(dtype=np.dtype(float), shape=(18,), blocks={**halves, (9,): other})
        assert changed.constant() is None


@pytest.mark.parametrize(
    "blocks",
    [
        {(0,): 2, (2,): 2},
        {(0,): 3, (3,): 3, (1,): 3},
        {(0,): 2, (2,): 2, (4,): 1},
        {(0,): 2, (2,): 2, (3,): 2},
        {(0,): 2, (2,): 2, (6,): 2},
        {(0,): 2, (2,): 2, (-2,): 2},
        {(0,): 4},
        {(0,): 0},
        {(0, 0): 6},
        {},
    ],
)
def test_what_does_not_cover_the_whole_is_told(blocks: dict[tuple[int, ...], int]) -> None:
    """A gap, an overlap, another size, a block beyond the end, and none at all."""
    held = {start: np.zeros(size, np.uint8) for start, size in blocks.items()}
    assert not Blocks(dtype=np.dtype(np.uint8), shape=(6,), blocks=held).are_tiles()
