"""The model: a character-level transformer of four blocks, cut into four pipeline stages."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

__all__ = ["LENGTH", "Stage", "Weights", "initial_weights", "pipeline"]

LENGTH = 128
_WIDTH = 160
_HEADS = 5

type Weights = dict[str, jax.Array]
"""The weights of one stage by name; a plain dict, so that a process without this module can hold them too."""

type Function = Callable[[Weights, Any], jax.Array]


class Stage:
    """One pipeline stage: its forward and its backward, each jitted.

    ``forward(weights, x)`` returns the output and the VJP object, from which the weights are left out.
    ``backward(vjp, cotangent)`` returns the gradients of weights and x; ``traces`` counts how often it was traced.

    >>> y, vjp = stage.forward(weights, x)
    """

    def __init__(self, number: int, function: Function) -> None:
        self.number = number
        self.traces = 0
        self._function = function
        self.forward = jax.jit(self._forward)
        self.backward = jax.jit(self._backward)

    def _forward(self, weights: Weights, x: Any) -> tuple[jax.Array, Any]:
        return jax.vjp(self._function, weights, x, saveable_args=(False, True))

    def _backward(self, vjp: Any, cotangent: jax.Array) -> tuple[Weights, Any]:
        self.traces += 1
        gradients: tuple[Weights, Any] = vjp(cotangent)
        return gradients


def pipeline() -> list[Stage]:
    """The four stages: embedding and block, block, block, block and loss.

    The first takes character codes and the last a pair of hidden state and targets.
    """
    functions: tuple[Function, ...] = (_embedded_block, _block, _block, _block_and_loss)
    return [Stage(number, function) for number, function in enumerate(functions, 1)]


def initial_weights(characters: int) -> list[Weights]:
    """The weights of each stage before training, always the same, for that many different characters."""
    block = {
        "attention_in": (_WIDTH, 3 * _WIDTH),
        "attention_out": (_WIDTH, _WIDTH),
        "perceptron_in": (_WIDTH, 4 * _WIDTH),
        "perceptron_out": (4 * _WIDTH, _WIDTH),
    }
    embedding = {"characters": (characters, _WIDTH), "places": (LENGTH, _WIDTH)}
    shapes = [block | embedding, block, block, block | {"head": (_WIDTH, characters)}]
    keys = jax.random.split(jax.random.key(0), len(shapes))
    return [_random(key, stage) for key, stage in zip(keys, shapes, strict=True)]


def _random(key: jax.Array, shapes: dict[str, tuple[int, int]]) -> Weights:
    keys = jax.random.split(key, len(shapes))
    return {
        name: jax.random.normal(one, shape) * np.float32(_scale(name, shape[0]))
        for one, (name, shape) in zip(keys, shapes.items(), strict=True)
    }


def _scale(name: str, inputs: int) -> float:
    # What writes to the hidden state or the scores starts small, so that the first loss is that of a blind guess.
    return (0.1 if name in ("attention_out", "perceptron_out", "head") else 1.0) / math.sqrt(inputs)


def _embedded_block(weights: Weights, tokens: jax.Array) -> jax.Array:
    # A product with one-hot rows, because the gradient of a lookup is a scatter, whose order a GPU does not promise.
    rows = jax.nn.one_hot(tokens, weights["characters"].shape[0])
    return _block(weights, rows @ weights["characters"] + weights["places"])


def _block(weights: Weights, x: jax.Array) -> jax.Array:
    x = x + _attention(weights, _normalized(x))
    hidden = jax.nn.gelu(_normalized(x) @ weights["perceptron_in"])
    return x + hidden @ weights["perceptron_out"]


def _block_and_loss(weights: Weights, x: tuple[jax.Array, jax.Array]) -> jax.Array:
    hidden, targets = x
    scores = jax.nn.log_softmax(_normalized(_block(weights, hidden)) @ weights["head"])
    return -jnp.mean(jnp.take_along_axis(scores, targets[..., None], axis=-1))


def _attention(weights: Weights, x: jax.Array) -> jax.Array:
    split = (*x.shape[:-1], 3, _HEADS, _WIDTH // _HEADS)
    query, key, value = jnp.moveaxis((x @ weights["attention_in"]).reshape(split), -3, 0)
    mixed = jax.nn.dot_product_attention(query, key, value, is_causal=True)
    return mixed.reshape(x.shape) @ weights["attention_out"]


def _normalized(x: jax.Array) -> jax.Array:
    return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-6)
