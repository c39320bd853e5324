"""Equality of arrays bit by bit."""

from __future__ import annotations

from typing import Any

import numpy as np
from jax.tree_util import tree_leaves_with_path

__all__ = ["same_bits"]


def same_bits(one: Any, other: Any) -> bool:
    """Whether two trees of arrays are the same tree with equal shapes, dtypes and bytes.

    Unlike ``==`` it tells 0.0 from -0.0, and finds a NaN equal to itself.

    >>> same_bits(np.float32(0.0), np.float32(-0.0))
    False
    """
    leaves, others = tree_leaves_with_path(one), tree_leaves_with_path(other)
    return [path for path, _ in leaves] == [path for path, _ in others] and all(
        _same_array(mine, theirs) for (_, mine), (_, theirs) in zip(leaves, others, strict=True)
    )


def _same_array(one: Any, other: Any) -> bool:
    one, other = np.asarray(one), np.asarray(other)
    return (one.dtype, one.shape, one.tobytes()) == (other.dtype, other.shape, other.tobytes())
