"""A small transformer over bytes in plain JAX, with its text and its optimizer; nothing here knows of a store."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import distribution
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

__all__ = [
    "Block",
    "Size",
    "Weights",
    "batch",
    "block",
    "cross_entropy",
    "embedded",
    "initial",
    "loss",
    "updated",
]

type Weights = dict[str, Any]
type Block = Callable[[Weights, jax.Array], jax.Array]

_BYTES, _HEADS = 256, 4
_RATE, _MEAN, _SQUARE, _SMALL = 3e-3, 0.9, 0.95, 1e-8


@dataclass(frozen=True, kw_only=True)
class Size:
    """How large the model and its batches are."""

    layers: int = 8
    width: int = 128
    sequences: int = 8
    length: int = 128


def batch(step: int, size: Size) -> jax.Array:
    """Pieces of the license of this project as bytes, uint8[sequences, length + 1]; the same for each call."""
    text = distribution("residual-store").read_text("licenses/LICENSE") or ""
    codes = np.frombuffer(text.encode(), np.uint8)
    starts = np.random.default_rng(step).integers(len(codes) - size.length, size=(size.sequences, 1))
    return jnp.asarray(codes[starts + np.arange(size.length + 1)])


def initial(size: Size) -> Weights:
    """The weights before training, always the same."""
    width, keys = size.width, iter(jax.random.split(jax.random.key(0), 3 + 4 * size.layers))

    def random(inputs: int, outputs: int, scale: float = 1.0) -> jax.Array:
        return jax.random.normal(next(keys), (inputs, outputs)) * np.float32(scale / math.sqrt(inputs))

    blocks = [
        {
            "attention_in": random(width, 3 * width),
            "attention_out": random(width, width, 0.1),
            "perceptron_in": random(width, 4 * width),
            "perceptron_out": random(4 * width, width, 0.1),
        }
        for _ in range(size.layers)
    ]
    embedding = {"bytes": random(_BYTES, width), "places": random(size.length, width)}
    return {"embedding": embedding, "blocks": blocks, "head": random(width, _BYTES, 0.1)}


def embedded(embedding: Weights, tokens: jax.Array) -> jax.Array:
    """The hidden state of each byte, float32[sequence, place, width]."""
    rows: jax.Array = embedding["bytes"][tokens] + embedding["places"]
    return rows


def block(weights: Weights, x: jax.Array) -> jax.Array:
    """One layer: attention and perceptron, each added to the hidden state."""
    x = x + _attention(weights, _normalized(x))
    hidden = jax.nn.gelu(_normalized(x) @ weights["perceptron_in"])
    out: jax.Array = x + hidden @ weights["perceptron_out"]
    return out


def cross_entropy(head: jax.Array, x: jax.Array, targets: jax.Array) -> jax.Array:
    """The mean loss of the bytes that follow, in nats."""
    scores = jax.nn.log_softmax(_normalized(x) @ head)
    return -jnp.mean(jnp.take_along_axis(scores, targets[..., None], axis=-1))


def loss(weights: Weights, tokens: jax.Array, *, block: Block = block) -> jax.Array:
    """The loss of a batch; ``block`` is the layer, which another way of training may wrap."""
    x = embedded(weights["embedding"], tokens[:, :-1])
    for own in weights["blocks"]:
        x = block(own, x)
    return cross_entropy(weights["head"], x, tokens[:, 1:])


def _attention(weights: Weights, x: jax.Array) -> jax.Array:
    parts = (x @ weights["attention_in"]).reshape(*x.shape[:-1], 3, _HEADS, -1)
    query, key, value = jnp.moveaxis(parts, -3, 0)
    mixed = jax.nn.dot_product_attention(query, key, value, is_causal=True)
    out: jax.Array = mixed.reshape(x.shape) @ weights["attention_out"]
    return out


def _normalized(x: jax.Array) -> jax.Array:
    return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-6)


@jax.jit
def updated(weights: Weights, gradients: Weights, moments: Any, step: int) -> tuple[Weights, Any]:
    """The weights and the moments of Adam after a step; the first step is 1, and its moments are zero."""
    mean = jax.tree.map(lambda old, new: _MEAN * old + (1 - _MEAN) * new, moments[0], gradients)
    square = jax.tree.map(lambda old, new: _SQUARE * old + (1 - _SQUARE) * new**2, moments[1], gradients)

    def moved(weight: jax.Array, mean: jax.Array, square: jax.Array) -> jax.Array:
        root = jnp.sqrt(square / (1 - _SQUARE**step))
        return weight - _RATE * mean / (1 - _MEAN**step) / (root + _SMALL)

    return jax.tree.map(moved, weights, mean, square), (mean, square)
