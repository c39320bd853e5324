"""The direct gradient of each case: what every way through a store is compared with."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import tree_leaves

from tests.cases import CASES, Case

__all__ = ["Direct", "close", "direct"]


@dataclass(frozen=True, kw_only=True)
class Direct:
    """One forward of a case, its VJP object as it is to be stored, and the gradients without any store.

    ``eager`` and ``jitted`` are the gradients of a VJP object with nothing left out, applied as it is and under
    `jax.jit`; their last bits may differ, because XLA fuses what runs under jit.
    """

    case: Case
    vjp: Any
    cotangent: Any
    eager: Any
    jitted: Any


@functools.cache
def direct(name: str) -> Direct:
    """The direct gradients of a case; made once, and shared by all tests."""
    case = CASES[name]()
    with case.context():
        y, vjp = case.forward()
        cotangent = case.cotangent_of(y)
        whole = vjp if case.saveable_args is True else case.direct()[1]
        return Direct(
            case=case,
            vjp=vjp,
            cotangent=cotangent,
            eager=whole(cotangent),
            jitted=jax.jit(lambda f_vjp, ct: f_vjp(ct))(whole, cotangent),
        )


def close(one: Any, other: Any) -> bool:
    """Whether two gradients agree up to rounding."""
    return all(map(_close, tree_leaves(one), tree_leaves(other)))


def _close(one: Any, other: Any) -> bool:
    if one.dtype == jax.dtypes.float0:
        return bool(one.shape == other.shape)
    is_coarse = jnp.issubdtype(one.dtype, jnp.floating) and one.dtype.itemsize < 4
    tolerance = 2e-2 if is_coarse else 2e-5
    wide = np.asarray(one).astype(np.complex128), np.asarray(other).astype(np.complex128)
    return bool(np.allclose(*wide, rtol=tolerance, atol=tolerance, equal_nan=True))
