"""Adam, in plain JAX."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

__all__ = ["Moments", "initial_moments", "updated"]

type Moments = tuple[Any, Any]
"""Running means of gradients and of their squares, each a tree like the weights."""

_RATE, _FIRST, _SECOND, _SMALL = 3e-3, 0.9, 0.95, 1e-8


def initial_moments(weights: Any) -> Moments:
    """Moments of zero for these weights."""
    return jax.tree.map(jnp.zeros_like, weights), jax.tree.map(jnp.zeros_like, weights)


@jax.jit
def updated(weights: Any, gradients: Any, moments: Moments, step: int) -> tuple[Any, Moments]:
    """The weights and moments after a step; the first step is 1."""
    first = jax.tree.map(lambda mean, one: _FIRST * mean + (1 - _FIRST) * one, moments[0], gradients)
    second = jax.tree.map(lambda mean, one: _SECOND * mean + (1 - _SECOND) * one * one, moments[1], gradients)

    def moved(weight: jax.Array, mean: jax.Array, square: jax.Array) -> jax.Array:
        unbiased = square / (1 - _SECOND**step)
        return weight - _RATE * mean / (1 - _FIRST**step) / (jnp.sqrt(unbiased) + _SMALL)

    return jax.tree.map(moved, weights, first, second), (first, second)
