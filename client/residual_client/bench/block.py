"""The residuals of a transformer block: layer norm, attention, perceptron, all in bfloat16."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

__all__ = ["block_vjp", "residual_arrays"]

_WIDTH = 1024
_HEADS = 4

type Weights = dict[str, jax.Array]


def block_vjp(*, batch: int, length: int) -> Any:
    """The VJP object of one block on random input [batch, length, 1024].

    The weights are not saveable, so they are not among the leaves.
    """
    random = jax.random.key(0)
    x = jax.random.normal(random, (batch, length, _WIDTH), jnp.bfloat16)
    forward = jax.jit(lambda weights, x: jax.vjp(_block, weights, x, saveable_args=(False, True)))
    _, vjp = forward(_weights(random), x)
    return vjp


def residual_arrays(vjp: Any) -> list[npt.NDArray[np.generic]]:
    """The residual leaves of a VJP object as host arrays."""
    return [np.asarray(leaf) for leaf in jax.tree.leaves(vjp) if isinstance(leaf, jax.Array)]


def _weights(random: jax.Array) -> Weights:
    shapes = {
        "attention_in": (_WIDTH, 3 * _WIDTH),
        "attention_out": (_WIDTH, _WIDTH),
        "perceptron_in": (_WIDTH, 4 * _WIDTH),
        "perceptron_out": (4 * _WIDTH, _WIDTH),
    }
    keys = jax.random.split(random, len(shapes))
    return {
        name: jax.random.normal(key, shape, jnp.bfloat16) * jnp.bfloat16(shape[0] ** -0.5)
        for key, (name, shape) in zip(keys, shapes.items(), strict=True)
    }


def _block(weights: Weights, x: jax.Array) -> jax.Array:
    x = x + _attention(weights, _normalized(x))
    hidden = jax.nn.gelu(_normalized(x) @ weights["perceptron_in"])
    return x + hidden @ weights["perceptron_out"]


def _attention(weights: Weights, x: jax.Array) -> jax.Array:
    split = (*x.shape[:-1], 3, _HEADS, _WIDTH // _HEADS)
    query, key, value = jnp.moveaxis((x @ weights["attention_in"]).reshape(split), -3, 0)
    scores = jnp.einsum("bqhd,bkhd->bhqk", query, key) * jnp.bfloat16(split[-1] ** -0.5)
    mixed = jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), value)
    return mixed.reshape(x.shape) @ weights["attention_out"]


def _normalized(x: jax.Array) -> jax.Array:
    centred = x - jnp.mean(x, axis=-1, keepdims=True)
    return centred * jax.lax.rsqrt(jnp.mean(centred * centred, axis=-1, keepdims=True) + 1e-6)
