"""Models whose weights get into the residuals although nobody saves them: captured, cast, and below shard_map."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, PartitionSpec

__all__ = ["MODELS", "WEIGHT_BYTES", "forward_of", "microbatch"]

_WIDTH, _LAYERS = 1024, 2
MODELS = ("captured", "cast", "shard_map")
WEIGHT_BYTES = {
    "captured": 4 * _LAYERS * _WIDTH**2,
    "cast": 2 * _LAYERS * _WIDTH**2,
    # Each of the two devices saves its own, and they are equal.
    "shard_map": 4 * _LAYERS * _WIDTH**2,
}


def microbatch(number: int) -> jax.Array:
    return jax.random.normal(jax.random.key(number), (256, _WIDTH))


def forward_of(name: str) -> Callable[[jax.Array], Any]:
    """The forward of a model with weights that are the same in every process."""
    keys = jax.random.split(jax.random.key(7), _LAYERS)
    weights = [jax.random.normal(key, (_WIDTH, _WIDTH)) / 32 for key in keys]

    def model(x: jax.Array) -> jax.Array:
        for weight in weights:
            x = jnp.tanh(x @ weight)
        return x

    def cast(x: jax.Array) -> jax.Array:
        for weight in weights:
            x = jnp.tanh(x.astype(jnp.bfloat16) @ weight.astype(jnp.bfloat16))
        return x

    spec = PartitionSpec("data")
    mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,))
    sharded = jax.shard_map(model, mesh=mesh, in_specs=spec, out_specs=spec)
    function = {"captured": model, "cast": cast, "shard_map": sharded}[name]
    return lambda x: jax.vjp(function, x)
