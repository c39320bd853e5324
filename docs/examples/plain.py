"""Way 1: plain JAX, as one compiled step and layer by layer."""

from __future__ import annotations

from collections.abc import Callable

import jax

from model import Weights, block, cross_entropy, embedded, loss

type Watch = Callable[[], None]

compiled = jax.jit(jax.value_and_grad(loss))

forward_embedding = jax.jit(lambda embedding, tokens: jax.vjp(embedded, embedding, tokens))
forward = jax.jit(lambda weights, x: jax.vjp(block, weights, x, saveable_args=(False, True)))
gradients_of_head = jax.jit(jax.value_and_grad(cross_entropy, argnums=(0, 1)))
backward = jax.jit(lambda f_vjp, y_bar: f_vjp(y_bar))


def layer_by_layer(weights: Weights, tokens: jax.Array, watch: Watch) -> tuple[jax.Array, Weights]:
    """Loss and gradients; all VJP objects wait on the device."""
    x, embedding_vjp = forward_embedding(weights["embedding"], tokens[:, :-1])
    waiting = []
    for own in weights["blocks"]:
        x, f_vjp = forward(own, x)
        watch()
        waiting.append(f_vjp)
        del f_vjp
        watch()
    value, (head_bar, x_bar) = gradients_of_head(weights["head"], x, tokens[:, 1:])
    blocks_bar: list[Weights] = []
    for own in reversed(weights["blocks"]):
        f_vjp = waiting.pop()
        f_vjp.args_res[0] = own
        watch()
        own_bar, x_bar = backward(f_vjp, x_bar)
        blocks_bar.insert(0, own_bar)
        del f_vjp
        watch()
    embedding_bar, _ = backward(embedding_vjp, x_bar)
    return value, {"embedding": embedding_bar, "blocks": blocks_bar, "head": head_bar}
