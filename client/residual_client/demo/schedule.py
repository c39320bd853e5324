"""The schedule of a step: the forwards of all microbatches first, then all backwards in reverse."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from residual_client.demo.model import Stage, Weights
from residual_client.demo.residuals import Residuals
from residual_client.demo.text import Microbatch

__all__ = ["LiveBytes", "Schedule"]


class LiveBytes:
    """The most bytes that live device arrays of this process had at any sample."""

    def __init__(self) -> None:
        self.peak = 0

    def sample(self) -> None:
        """Take the sum of ``nbytes`` over all live arrays."""
        self.peak = max(self.peak, sum(array.nbytes for array in jax.live_arrays()))


class Schedule:
    """Runs steps over the stages; ``residuals`` says where VJP objects wait between forward and backward."""

    def __init__(self, stages: Sequence[Stage], residuals: Residuals, live: LiveBytes) -> None:
        self._stages = stages
        self._residuals = residuals
        self._live = live

    def gradients(
        self, weights: Sequence[Weights], microbatches: Sequence[Microbatch], name: str
    ) -> tuple[list[jax.Array], list[Weights]]:
        """The loss of each microbatch, and the gradient of their mean for each stage."""
        losses, waiting = [], []
        for number, microbatch in enumerate(microbatches, 1):
            loss, held = self._forwards(weights, microbatch, f"{name}/micro-{number}")
            losses.append(loss)
            waiting.append(held)
        share = jnp.asarray(1 / len(microbatches), np.float32)
        sums = self._backwards(weights, waiting.pop(), share)
        while waiting:
            sums = _added(sums, self._backwards(weights, waiting.pop(), share))
        return losses, sums

    def _forwards(
        self, weights: Sequence[Weights], microbatch: Microbatch, name: str
    ) -> tuple[jax.Array, list[Any]]:
        """The loss of one microbatch, and what stands for the VJP object of each stage."""
        y, held = jnp.asarray(microbatch.tokens), []
        for stage, own in zip(self._stages, weights, strict=True):
            x = (y, jnp.asarray(microbatch.targets)) if stage is self._stages[-1] else y
            y, one = self._forward(stage, own, x, f"{name}/stage-{stage.number}")
            held.append(one)
        return y, held

    def _forward(self, stage: Stage, weights: Weights, x: Any, name: str) -> tuple[jax.Array, Any]:
        y, vjp = stage.forward(weights, x)
        self._live.sample()
        return y, self._residuals.hold(vjp, name)

    def _backwards(self, weights: Sequence[Weights], held: list[Any], cotangent: jax.Array) -> list[Weights]:
        """The gradients of one microbatch for each stage; ``held`` is emptied from its end."""
        gradients: list[Weights] = []
        for stage, own in zip(reversed(self._stages), reversed(weights), strict=True):
            gradient, x_bar = self._backward(stage, own, held.pop(), cotangent)
            cotangent = x_bar[0] if isinstance(x_bar, tuple) else x_bar
            gradients.insert(0, gradient)
        return gradients

    def _backward(
        self, stage: Stage, weights: Weights, held: Any, cotangent: jax.Array
    ) -> tuple[Weights, Any]:
        vjp = self._residuals.fetch(held, weights)
        gradients: tuple[Weights, Any] = stage.backward(vjp, cotangent)
        self._live.sample()
        self._residuals.drop(held)
        return gradients


@jax.jit
def _added(one: Any, other: Any) -> Any:
    return jax.tree.map(jnp.add, one, other)
