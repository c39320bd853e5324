"""A training: the same steps from the same start, whatever computes the gradients; and how two of them differ."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np

from model import Size, Weights, batch, initial, updated

__all__ = ["Comparison", "Step", "Training", "train"]

type Step = Callable[[Weights, jax.Array], tuple[jax.Array, Weights]]
"""From weights and a batch to the loss and the gradients."""


@dataclass(kw_only=True, eq=False)
class Training:
    """What a training leaves behind, all in host memory.

    ``losses`` and ``seconds`` have one entry per step, ``gradients`` are those of the first step, and ``weights`` the
    final ones.
    """

    losses: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    gradients: Any = None
    weights: Any = None


def train(step: Step, size: Size, steps: int) -> Training:
    """Train from the initial weights for that many steps."""
    training, weights = Training(), initial(size)
    moments = jax.tree.map(jnp.zeros_like, (weights, weights))
    for number in range(1, steps + 1):
        started = time.perf_counter()
        value, gradients = step(weights, batch(number, size))
        if number == 1:
            training.gradients = _on_host(gradients)
        weights, moments = updated(weights, gradients, moments, number)
        del gradients
        training.losses.append(float(value))
        training.seconds.append(time.perf_counter() - started)
    training.weights = _on_host(weights)
    return training


def _on_host(tree: Any) -> Any:
    """A copy; a view would keep the device arrays alive."""
    return jax.tree.map(np.array, tree)


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """How one training differs from another.

    ``same_bits``: all losses, the first gradients and the final weights are equal bit by bit.
    ``losses``: the largest relative difference of a loss.
    ``gradients``: the largest difference within a gradient, relative to the largest element of that gradient.
    """

    same_bits: bool
    losses: float
    gradients: float

    @classmethod
    def of(cls, one: Training, other: Training) -> Self:
        """Compare two trainings of the same model."""
        losses, gradients, weights = (
            list(zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True))
            for ours, theirs in (
                (one.losses, other.losses),
                (one.gradients, other.gradients),
                (one.weights, other.weights),
            )
        )
        arrays = [*gradients, *weights]
        return cls(
            same_bits=one.losses == other.losses and all(a.tobytes() == b.tobytes() for a, b in arrays),
            losses=max(abs(a - b) / abs(b) for a, b in losses),
            gradients=max(float(np.abs(a - b).max() / np.abs(b).max()) for a, b in gradients),
        )
