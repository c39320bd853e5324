"""Arrays that `jax.vmap` gives a batch axis to all of, or to none.

`jax.custom_vjp` needs it: to an output without a batch axis, jax 0.11 gives its cotangent once for each element of the
batch, so the gradient is wrong, and jax 0.12 refuses it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

__all__ = ["mapped_together"]


def mapped_together(arrays: Sequence[Any]) -> list[Any]:
    """The same arrays, each of which has a batch axis as soon as one of them has.

    >>> two = lambda a, b: mapped_together([a, b])
    >>> [one.shape for one in jax.vmap(two, (0, None))(jnp.ones(3), 2.0)]
    [(3,), (3,)]
    """
    return list(_together_p.bind(*arrays))


def _batched(
    mapped: Any, arrays: Sequence[Any], axes: Sequence[int | None]
) -> tuple[list[Any], Sequence[int | None]]:
    if all(axis is None for axis in axes):
        return mapped_together(arrays), axes
    moved = [
        batching.bdim_at_front(array, axis, mapped.size, mapped.explicit_mesh_axis)
        for array, axis in zip(arrays, axes, strict=True)
    ]
    return mapped_together(moved), [0] * len(moved)


_together_p = Primitive("mapped_together")
_together_p.multiple_results = True
_together_p.def_impl(lambda *arrays: list(arrays))
_together_p.def_abstract_eval(lambda *avals: list(avals))
ad.primitive_jvps[_together_p] = lambda primals, tangents: (mapped_together(primals), list(tangents))
# The rules of this kind are told of a mesh axis under the batch.
batching.fancy_primitive_batchers[_together_p] = _batched
mlir.register_lowering(_together_p, lambda _, *arrays: list(arrays))
