"""Encodings: lossless, chosen by bits and not by values, and never larger than the array."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings

from residual_store import Bundle
from residual_store.dtypes import DTYPES, FLOAT0
from residual_store.errors import InvalidManifest
from residual_store.repetition import sample_of
from tests.store.bundles import sharded, values_of
from tests.store.strategies import arrays, bundles


def _encodings(*arrays: npt.ArrayLike) -> list[str]:
    bundle = Bundle.of_arrays({str(index): array for index, array in enumerate(arrays)})
    return [leaf.encoding for leaf in bundle.manifest.leaves]


@settings(deadline=None, max_examples=300)
@given(arrays())
def test_an_encoding_loses_nothing(array: npt.NDArray[Any]) -> None:
    """Dtype, shape and every bit come back from any layout and byte order, in at most the bytes of the array."""
    bundle = Bundle.of_arrays({"h": array})
    native = array.astype(array.dtype.newbyteorder("=")) if array.dtype.names is None else array
    got = bundle.array(0)
    assert (got.dtype, got.shape) == (native.dtype, native.shape)
    assert got.tobytes() == native.tobytes()
    assert bundle.manifest.nbytes <= array.nbytes
    assert (
        bundle.payloads[0].nbytes
        == bundle.manifest.leaves[0].nbytes
        == bundle.manifest.leaves[0].encoded_nbytes
    )


@settings(deadline=None, max_examples=100)
@given(bundles())
def test_a_bundle_is_what_its_manifest_says(bundle: Bundle) -> None:
    """Payloads have the lengths of the manifest, and an alias repeats an earlier leaf with bytes."""
    for leaf, payload in zip(bundle.manifest.leaves, bundle.payloads, strict=True):
        assert payload.nbytes == leaf.nbytes
        assert (leaf.alias_of is not None) == (leaf.encoding == "alias")
        if leaf.alias_of is not None:
            assert leaf.alias_of < leaf.index
            assert bundle.manifest.leaves[leaf.alias_of].encoding != "alias"
            assert bundle.array(leaf.index).tobytes() == bundle.array(leaf.alias_of).tobytes()


@pytest.mark.parametrize("name", [name for name in DTYPES if name != FLOAT0])
def test_a_constant_is_one_element(name: str) -> None:
    """A leaf whose elements have equal bits takes the bytes of one, in every dtype."""
    one = values_of(name, (1,), seed=5)
    bundle = Bundle.of_arrays({"h": np.broadcast_to(one, (50, 3))})
    assert (bundle.manifest.leaves[0].encoding, bundle.manifest.nbytes) == ("constant", one.nbytes)
    assert bundle.array(0).tobytes() == one.tobytes() * 150


def test_equal_values_are_not_equal_bits() -> None:
    """0.0 and -0.0, and two NaNs of different bits, are no constant and no repetition of each other."""
    nans = np.array([0x7FF8000000000000, 0x7FF8000000000001], np.uint64).view(np.float64)
    assert _encodings(np.array([0.0, -0.0])) == ["raw"]
    assert _encodings(nans) == ["raw"]
    assert _encodings(np.array([0.0, 1.0]), np.array([-0.0, 1.0])) == ["raw", "raw"]
    assert _encodings(np.full(9, np.nan)) == ["constant"]


@pytest.mark.parametrize("dtype", ["uint8", "float16", "float32", "float64", "complex128"])
@pytest.mark.parametrize("count", [3, 4099, 2_000_003])
def test_one_different_element_is_found_wherever_it_is(dtype: str, count: int) -> None:
    """A leaf that is constant but for one element, at any place, is neither a constant nor a repetition."""
    zeros = np.zeros(count, dtype)
    array = zeros.copy()
    places = {*range(19), 256, 512, 65_535, 65_536, 131_071, 131_072, count // 3, count // 2, *range(-19, 0)}
    for place in sorted(place for place in places if -count <= place < count):
        array[place] = 1
        assert _encodings(array, zeros) == ["raw", "constant"], place
        other = array.copy()
        other[place] = 2
        assert _encodings(array, other, array.copy())[:2] == ["raw", "raw"], place
        assert _encodings(array, array.copy(), other) == ["raw", "alias", "raw"], place
        array[place] = 0


def test_leaves_with_equal_samples_are_told_apart() -> None:
    """Large leaves that differ only where no sample looks are no repetition, and their copies are one."""
    one, other = np.zeros(200_000, np.uint8), np.zeros(200_000, np.uint8)
    one[0], other[0] = 1, 1
    one[80_000], other[80_000] = 1, 2
    assert sample_of(one) == sample_of(other)
    assert _encodings(one, other) == ["raw", "raw"]
    assert _encodings(one, other, other.copy(), one.copy()) == ["raw", "raw", "alias", "alias"]


def test_many_leaves_with_equal_samples_lose_nothing() -> None:
    """Where it has been in vain too often, leaves are not compared any more but stored as they are."""
    arrays = [np.zeros(300_000, np.float32) for _ in range(40)]
    for index, array in enumerate(arrays):
        array[0], array[150_000] = 1, index % 30
    bundle = Bundle.of_arrays({str(index): array for index, array in enumerate(arrays)})
    for index, array in enumerate(arrays):
        assert bundle.array(index).tobytes() == array.tobytes()
    assert {leaf.encoding for leaf in bundle.manifest.leaves[30:]} <= {"raw", "alias"}


@pytest.mark.parametrize("count", [2, 7, 8, 9, 1000, 1001])
def test_a_mask_is_one_bit_for_each_element(count: int) -> None:
    """Also where the number of elements is no multiple of eight."""
    mask = np.arange(count) % 2 == 0
    bundle = Bundle.of_arrays({"mask": mask})
    assert (bundle.manifest.leaves[0].encoding, bundle.manifest.nbytes) == ("bits", -(-count // 8))
    assert np.array_equal(bundle.array(0), mask)


def test_an_array_that_occurs_twice_is_stored_once() -> None:
    """By identity it becomes one array again; equal bytes of another dtype and shape keep theirs."""
    h = np.arange(24.0)
    bundle = Bundle.of_arrays(
        {"h": h, "same": h, "equal": h.copy(), "other": h.copy().view(np.int64).reshape(4, 6)}
    )
    leaves = bundle.manifest.leaves
    assert [leaf.alias_of for leaf in leaves] == [None, 0, 0, 0]
    assert [leaf.same_array for leaf in leaves] == [False, True, False, False]
    assert (bundle.manifest.nbytes, bundle.manifest.array_nbytes) == (192, 768)
    assert (bundle.array(3).dtype.name, bundle.array(3).shape) == ("int64", (4, 6))


def _sharded(*arrays: tuple[npt.NDArray[Any], int]) -> Bundle:
    return sharded({str(index): one for index, one in enumerate(arrays)})


@pytest.mark.parametrize("name", [name for name in DTYPES if name not in (FLOAT0, "bool")])
@pytest.mark.parametrize("count", [2, 5])
def test_equal_shards_are_stored_as_one(name: str, count: int) -> None:
    """A leaf whose shards along dimension 0 are equal takes the bytes of one, and comes back whole, in every dtype."""
    tile = values_of(name, (3, 7), seed=5)
    array = np.concatenate([tile] * count)
    bundle = _sharded((array, count), (array.copy(), 1))
    (tiled, raw) = bundle.manifest.leaves
    assert (tiled.encoding, tiled.nbytes, tiled.tile_shape) == ("tiled", tile.nbytes, tile.shape)
    assert (raw.encoding, raw.nbytes) == ("raw", array.nbytes)
    for index in range(2):
        assert (bundle.array(index).dtype, bundle.array(index).shape) == (array.dtype, array.shape)
        assert bundle.array(index).tobytes() == array.tobytes()


@pytest.mark.parametrize("count", [2, 3, 8])
@pytest.mark.parametrize("rows", [1, 3, 5003, 600_001])
def test_one_different_byte_in_a_shard_is_found_wherever_it_is(count: int, rows: int) -> None:
    """Then the leaf is raw, because the shards are compared byte for byte."""
    array = np.concatenate([np.random.default_rng(rows).integers(0, 256, rows, np.uint8)] * count)
    assert _sharded((array, count)).manifest.leaves[0].encoding == ("constant" if rows == 1 else "tiled")
    edges = {edge + near for edge in range(0, array.size + 1, rows) for near in (-9, -8, -1, 0, 1, 8)}
    for place in {*edges, 4096, 65_536, rows // 2, array.size // 2, array.size // 3}:
        if 0 <= place < array.size:
            array[place] ^= 1
            bundle = _sharded((array, count))
            assert bundle.manifest.leaves[0].encoding == "raw", place
            assert bundle.array(0).tobytes() == array.tobytes()
            array[place] ^= 1


def test_equal_shards_are_found_behind_many_that_are_not() -> None:
    """Leaves that differ where a sample looks cost nothing of what may be compared in vain."""
    rng = np.random.default_rng(0)
    tile = rng.random((1000, 10))
    activations = [(rng.random((2000, 10)), 2) for _ in range(60)]
    leaves = _sharded(*activations, (np.concatenate([tile, tile]), 2)).manifest.leaves
    assert [leaf.encoding for leaf in leaves] == [*["raw"] * 60, "tiled"]


def test_shards_that_are_nearly_equal_lose_nothing() -> None:
    """Where it has been in vain too often, they are not compared any more but stored as they are."""
    arrays = [np.zeros((2, 300_000), np.float32) for _ in range(12)]
    for index, array in enumerate(arrays):
        array[:, 0], array[0, 150_001] = 1, index
    bundle = _sharded(*((array, 2) for array in arrays))
    assert [leaf.encoding for leaf in bundle.manifest.leaves[:2]] == ["tiled", "raw"]
    for index, array in enumerate(arrays):
        assert bundle.array(index).tobytes() == array.tobytes()


def test_a_tile_repeats_only_a_tile_of_as_many() -> None:
    """A leaf that has the bytes of a tile is no repetition of the whole, nor is one with more of the same tiles."""
    tile = np.arange(1, 13.0)
    two, three = np.tile(tile, 2), np.tile(tile, 3)
    leaves = _sharded(
        (tile, 1), (two, 2), (three, 3), (two.copy(), 2), (tile.copy(), 1), (two.view(np.int64), 2), (two, 2)
    ).manifest.leaves
    assert [leaf.encoding for leaf in leaves] == ["raw", "tiled", "tiled", *["alias"] * 4]
    assert [leaf.alias_of for leaf in leaves] == [None, None, None, 1, 0, 1, 1]
    bundle = _sharded((tile, 1), (two, 2), (three, 3), (two.view(np.int64), 2))
    wanted = [tile, two, three, two]
    assert [bundle.array(index).tobytes() for index in range(4)] == [one.tobytes() for one in wanted]


def test_what_else_is_smaller_goes_before_tiles() -> None:
    """A constant is one element, and a mask is bits, however they are split; a dimension that does not go up is whole."""
    ones, mask = np.ones((4, 3)), np.tile([True, False], (4, 1))
    leaves = _sharded(
        (ones, 2), (mask, 2), (np.arange(12.0) % 3, 5), (np.arange(12.0) % 3, 4)
    ).manifest.leaves
    assert [leaf.encoding for leaf in leaves] == ["constant", "bits", "raw", "tiled"]


def test_nothing_is_copied_to_make_a_bundle() -> None:
    """A contiguous little-endian array and its payload are the same memory."""
    h = np.arange(1000.0)
    assert np.shares_memory(Bundle.of_arrays({"h": h}).payloads[0], h)


@pytest.mark.parametrize(
    "array",
    [
        np.array(["text"]),
        np.array([object()]),
        np.array([1.5], np.longdouble),
        np.array(["2020-01-01"], "datetime64[D]"),
        np.zeros(3, [("a", np.int32)]),
        np.zeros(3, "V4"),
    ],
    ids=lambda array: str(array.dtype),
)
def test_what_jax_does_not_have_is_refused(array: npt.NDArray[Any]) -> None:
    """A dtype without a canonical name is refused when the bundle is made, by its name."""
    with pytest.raises(InvalidManifest, match=r"cannot be stored"):
        Bundle.of_arrays({"h": array})
