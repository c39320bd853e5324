"""Hypothesis strategies: bundles of every kind of leaf."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from hypothesis import strategies as st

from residual_store import Bundle
from residual_store.dtypes import DTYPES
from tests.store.bundles import sharded, values_of

__all__ = ["arrays", "bundles", "shards", "user_values"]

_SHAPES = st.lists(st.integers(0, 6), max_size=4).map(tuple)
_SPECIAL = [0.0, -0.0, float("inf"), float("-inf"), float("nan"), 1e-45, -5e-324, 1.0]
user_values = st.one_of(
    st.text(st.characters(exclude_categories=["Cs"]), max_size=20),
    st.integers(-(1 << 63), (1 << 64) - 1),
    st.booleans(),
    st.floats(allow_nan=False, allow_infinity=False),
)


@st.composite
def arrays(draw: st.DrawFn) -> npt.NDArray[Any]:
    """A host array: random bits, one repeated element, special floats, a transposed view or big-endian bytes."""
    name, shape, seed = draw(st.sampled_from(sorted(DTYPES))), draw(_SHAPES), draw(st.integers(0, 1 << 20))
    values = values_of(name, shape, seed=seed)
    match draw(st.sampled_from(["bits", "constant", "special", "transposed", "strided", "big-endian"])):
        case "constant" if values.size:
            return np.broadcast_to(values.reshape(-1)[0], shape)
        case "special" if name in {"float16", "float32", "float64", "complex64", "bfloat16"}:
            chosen = draw(st.lists(st.sampled_from(_SPECIAL), min_size=1, max_size=8))
            with np.errstate(all="ignore"):
                return np.resize(np.array(chosen).astype(DTYPES[name]), shape)
        case "transposed":
            return values.T
        case "strided" if values.ndim:
            return values[::-2]
        case "big-endian" if DTYPES[name].isbuiltin and DTYPES[name].itemsize > 1:
            return values.astype(DTYPES[name].newbyteorder(">"))
    return values


@st.composite
def shards(draw: st.DrawFn, array: npt.NDArray[Any]) -> tuple[npt.NDArray[Any], int]:
    """An array that is this one, or this one several times over, and the number of devices that it is split over."""
    count = draw(st.integers(1, 4))
    if count == 1 or not array.ndim or not array.nbytes:
        return array, count if array.ndim else 1
    repeated = np.concatenate([array] * count)
    return repeated, draw(st.sampled_from([count, len(repeated)]))


@st.composite
def bundles(draw: st.DrawFn) -> Bundle:
    """Up to nine leaves, some of them the same array, equal bytes or equal shards, and metadata."""
    found = [draw(shards(array)) for array in draw(st.lists(arrays(), max_size=6))]
    for index in draw(st.lists(st.integers(0, 5), max_size=3)):
        if index < len(found):
            array, count = found[index]
            found.append(
                (array, count) if draw(st.booleans()) else (array.copy(), draw(st.integers(1, count)))
            )
    user = draw(st.dictionaries(st.text("abcdef/..\0 \N{SNOWMAN}", max_size=9), user_values, max_size=4))
    names = draw(st.permutations(range(len(found))))
    return sharded({f"leaf {names[i]}": one for i, one in enumerate(found)}, user=user).sealed()
