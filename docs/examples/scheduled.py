"""Way 2: the same layer by layer, and each VJP object waits in a store."""

from __future__ import annotations

import jax

import residual_client as rc
from model import Weights
from plain import Watch, backward, forward, forward_embedding, gradients_of_head


def layer_by_layer(
    client: rc.Client, weights: Weights, tokens: jax.Array, watch: Watch
) -> tuple[jax.Array, Weights]:
    """Loss and gradients; handles wait in the place of VJP objects."""
    x, embedding_vjp = forward_embedding(weights["embedding"], tokens[:, :-1])
    waiting = []
    for own in weights["blocks"]:
        x, f_vjp = forward(own, x)
        watch()
        waiting.append(client.offload(f_vjp))
        del f_vjp
        watch()
    client.prefetch(reversed(waiting))
    value, (head_bar, x_bar) = gradients_of_head(weights["head"], x, tokens[:, 1:])
    blocks_bar: list[Weights] = []
    for own in reversed(weights["blocks"]):
        handle = waiting.pop()
        f_vjp = client.restore(handle, args=(own, None))
        watch()
        own_bar, x_bar = backward(f_vjp, x_bar)
        blocks_bar.insert(0, own_bar)
        del f_vjp
        client.delete(handle)
        watch()
    embedding_bar, _ = backward(embedding_vjp, x_bar)
    return value, {"embedding": embedding_bar, "blocks": blocks_bar, "head": head_bar}
