"""Rematerialization: what the policy keeps, and where."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from tests.cases.case import Case, matrix, ramp, registered


@registered
def vjp_remat_dots_policy() -> Case:
    block = jax.checkpoint(lambda x, w: jnp.sin(jnp.sin(x) @ w), policy=jax.checkpoint_policies.dots_saveable)
    return Case(fn=block, args=(ramp(), matrix()), saveable_args=(True, False))


@registered
def vjp_remat_nothing_saved_all_not_saveable() -> Case:
    block = jax.checkpoint(lambda x, w: jnp.tanh(jnp.tanh(x @ w) @ w))
    return Case(fn=block, args=(ramp(), matrix()), saveable_args=False, leaves=0)


@registered
def vjp_remat_saves_a_name() -> Case:
    policy = jax.checkpoint_policies.save_only_these_names("hidden")

    def block(x: Any, w: Any) -> Any:
        hidden = checkpoint_name(jnp.tanh(x @ w), "hidden")
        return jnp.sin(hidden @ w)

    return Case(fn=jax.checkpoint(block, policy=policy), args=(ramp(), matrix()), saveable_args=(True, False))


def _offloading_block(jit: bool) -> Case:
    policy = jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=[],
        names_which_can_be_offloaded=["hidden"],
        offload_src="device",
        offload_dst="pinned_host",
    )

    def block(x: Any, w: Any) -> Any:
        hidden = checkpoint_name(jnp.tanh(x @ w), "hidden")
        return jnp.sin(hidden @ w)

    return Case(fn=jax.checkpoint(block, policy=policy), args=(ramp(), matrix()), jit=jit)


@registered
def vjp_remat_offload_pinned_host() -> Case:
    return _offloading_block(jit=False)


@registered
def vjp_remat_offload_pinned_host_jit() -> Case:
    return _offloading_block(jit=True)


@registered
def vjp_remat_with_a_closed_over_weight() -> Case:
    w = matrix()
    return Case(
        fn=jax.checkpoint(lambda x: jnp.tanh(jnp.tanh(x @ w) @ w)), args=(ramp(),), saveable_args=False
    )


@registered
def vjp_scan_of_remat_jit() -> Case:
    @jax.checkpoint
    def body(c: Any, w: Any) -> Any:
        c = jnp.tanh(jnp.sin(c @ w) @ w)
        return c, c.sum()

    ws = jnp.stack([matrix(scale=0.02 * (index + 1)) for index in range(4)])
    return Case(
        fn=lambda x, ws: jax.lax.scan(body, x, ws), args=(ramp(), ws), saveable_args=(True, False), jit=True
    )


@registered
def vjp_remat_of_scan() -> Case:
    @jax.checkpoint
    def run(x: Any, ws: Any) -> Any:
        return jax.lax.scan(lambda c, w: (jnp.sin(c @ w), None), x, ws)[0]

    ws = jnp.stack([matrix(scale=0.02 * (index + 1)) for index in range(4)])
    return Case(fn=run, args=(ramp(), ws), saveable_args=False)
