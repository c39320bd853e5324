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
from tests.store.bundles import values_of
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
    """Payloads have the lengths and digests of the manifest, and an alias repeats an earlier leaf with bytes."""
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
