"""Shapes, layouts, sizes and numbers of leaves."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tests.cases.case import Case, ramp, registered


@registered
def shape_zero_size_leaf() -> Case:
    return Case(
        fn=lambda z, x: jnp.sum(jnp.sin(z)) + jnp.sum(x * x), args=(jnp.zeros((0, 3)), ramp()), leaves=2
    )


@registered
def shape_zero_size_of_many_kinds() -> Case:
    empty = [jnp.zeros(shape) for shape in ((0,), (2, 0, 3), (0, 0))]

    def summed(empty: Any, x: Any) -> Any:
        return sum(jnp.sum(jnp.where(e > 0, e * e, jnp.exp(e))) for e in empty) + jnp.sum(x * x)

    return Case(fn=summed, args=(empty, ramp()))


@registered
def shape_scalar_0d() -> Case:
    return Case(fn=lambda a, b: jnp.sin(a) * b, args=(jnp.float32(0.3), jnp.float32(2.0)))


@registered
def shape_0d_against_ones() -> Case:
    args = tuple(jnp.full(shape, 0.3 + 0.1 * len(shape)) for shape in ((), (1,), (1, 1), (1, 1, 1)))
    return Case(fn=lambda a, b, c, d: jnp.sin(a) * b * c * d, args=args)


@registered
def shape_rank_eight() -> Case:
    x = jnp.arange(2.0**7).reshape(2, 2, 2, 2, 2, 2, 2, 1) * 0.01
    return Case(fn=lambda x: jnp.sin(x) * x.transpose(6, 5, 4, 3, 2, 1, 0, 7), args=(x,))


@registered
def shape_zero_leaves() -> Case:
    return Case(fn=lambda a, b: a + b, args=(ramp(), ramp() * 2), leaves=0)


@registered
def shape_all_args_not_saveable() -> Case:
    return Case(fn=lambda a, b: a * b, args=(ramp(), ramp() * 2), saveable_args=False, leaves=0)


@registered
def shape_twelve_same_shape_leaves() -> Case:
    def summed(*xs: Any) -> Any:
        return sum(jnp.sum(x * x * (index + 1)) for index, x in enumerate(xs))

    return Case(fn=summed, args=tuple(ramp() * (index + 1) for index in range(12)), leaves=24)


@registered
def shape_many_tiny_leaves() -> Case:
    count = 1500
    xs = [jnp.float32(index / count) for index in range(count)]
    return Case(fn=lambda xs: sum(x * x for x in xs), args=(xs,), leaves=count)


@registered
def shape_leaf_of_more_than_a_mebibyte() -> Case:
    # Large leaves are arrays of their own on disk, small ones share one.
    x = (jnp.arange(2**18 + 3) % 97).astype(jnp.float32) * 0.01
    return Case(fn=lambda x, y: jnp.sum(jnp.sin(x) * x) * jnp.sum(y * y), args=(x, ramp()))


@registered
def shape_constant_leaf_of_more_than_a_mebibyte() -> Case:
    return Case(fn=lambda x: jnp.sum(x * x), args=(jnp.full(2**18 + 3, 1.5),))


@registered
def shape_transposed_numpy_arg() -> Case:
    transposed = np.arange(12, dtype=np.float32).reshape(3, 4).T
    return Case(fn=lambda a: jnp.sin(a) * a, args=(transposed * np.float32(0.1),))


@registered
def shape_reversed_numpy_arg() -> Case:
    steps = (np.arange(24, dtype=np.float32) * np.float32(0.1)).reshape(4, 6)[::-1, ::2]
    return Case(fn=lambda a: jnp.sin(a) * a, args=(steps,))


@registered
def shape_broadcast_numpy_arg() -> Case:
    return Case(fn=lambda a: a * a, args=(np.broadcast_to(np.float32(1.5), (5, 7)),))


@registered
def shape_masks_of_odd_lengths() -> Case:
    xs = [ramp(n) - 1 for n in (1, 7, 8, 9, 65)]

    def clipped(xs: Any) -> Any:
        return [jax.nn.relu(x) for x in xs]

    return Case(fn=clipped, args=(xs,))
