"""Dtypes by canonical name: the only spelling that survives a journey.

``numpy.dtype.str`` is lossy: eight of JAX's types share ``<V1`` and float8_e5m2's ``<f1`` cannot even be parsed
(google/ml_dtypes#41, #148).
Host arrays hold one byte per element for the 2- and 4-bit types (jax-ml/ml_dtypes#319).
"""

from __future__ import annotations

from collections.abc import Mapping

import ml_dtypes
import numpy as np

from residual_store.errors import InvalidManifest

__all__ = ["DTYPES", "FLOAT0", "NUMPY_NAMES", "dtype_of", "element_bytes", "name_of", "tensorstore_name"]

FLOAT0 = "float0"
"""The dtype of the tangents of integers: a shape and no bytes (``jax.dtypes.float0``)."""

NUMPY_NAMES = [
    "bool",
    "int8",
    "int16",
    "int32",
    "int64",
    "uint8",
    "uint16",
    "uint32",
    "uint64",
    "float16",
    "float32",
    "float64",
    "complex64",
    "complex128",
]
_ML_NAMES = [
    "bfloat16",
    "int1",
    "int2",
    "int4",
    "uint1",
    "uint2",
    "uint4",
    "float4_e2m1fn",
    "float6_e2m3fn",
    "float6_e3m2fn",
    "float8_e3m4",
    "float8_e4m3",
    "float8_e4m3b11fnuz",
    "float8_e4m3fn",
    "float8_e4m3fnuz",
    "float8_e5m2",
    "float8_e5m2fnuz",
    "float8_e8m0fnu",
]

DTYPES: Mapping[str, np.dtype] = {
    **{name: np.dtype(name) for name in NUMPY_NAMES},
    **{name: np.dtype(getattr(ml_dtypes, name)) for name in _ML_NAMES},
    FLOAT0: np.dtype([("float0", np.void, 0)]),
}
"""Canonical name -> numpy dtype, for every dtype that a residual of JAX can have."""

_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_ELEMENT_BYTES = {name: dtype.itemsize for name, dtype in DTYPES.items()}

# What tensorstore's zarr3 driver has no data type for is held as unsigned bytes of the same width.
_HELD_AS_BYTES = frozenset(
    {"int1", "uint1", "uint2", "uint4", "float6_e2m3fn", "float6_e3m2fn", "float8_e4m3"}
)


def dtype_of(name: str) -> np.dtype:
    """The numpy dtype with this canonical name; raises `InvalidManifest` for an unknown one.

    >>> dtype_of("bfloat16").itemsize
    2
    """
    try:
        return DTYPES[name]
    except KeyError:
        raise InvalidManifest(
            f"the dtype {name[:40]!r} is unknown; the known ones are {', '.join(DTYPES)}"
        ) from None


def name_of(dtype: np.dtype) -> str:
    """The canonical name of a numpy dtype; raises `InvalidManifest` for one that JAX does not have.

    >>> name_of(np.dtype(">f4"))
    'float32'
    """
    known = _NAMES.get(dtype)
    if known is not None:
        return known
    name = dtype.name
    if name not in DTYPES:
        raise InvalidManifest(f"a leaf of dtype {name!r} cannot be stored; JAX has no such dtype")
    return name


def element_bytes(name: str) -> int:
    """Bytes of one element on the host: 0 for float0, 1 for the 2- and 4-bit types."""
    return _ELEMENT_BYTES.get(name) or dtype_of(name).itemsize


def tensorstore_name(name: str) -> str:
    """The zarr3 data type that holds this dtype: itself, or unsigned bytes where tensorstore has no such type."""
    return "uint8" if name in _HELD_AS_BYTES else name
