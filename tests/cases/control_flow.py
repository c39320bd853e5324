"""Loops and branches, whose residuals are stacked or tagged."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from tests.cases.case import Case, matrix, ramp, registered


def _stack(count: int = 5) -> jax.Array:
    """Weights that differ from step to step, so that a step taken in the wrong order shows."""
    return jnp.stack([matrix(scale=0.02 * (index + 1)) for index in range(count)])


@registered
def vjp_scan() -> Case:
    def run(x: Any, ws: Any) -> Any:
        def body(c: Any, w: Any) -> Any:
            c = jnp.tanh(c @ w)
            return c, c.sum()

        return lax.scan(body, x, ws)

    return Case(fn=run, args=(ramp(), _stack()), saveable_args=(True, False))


@registered
def vjp_scan_reverse_unroll() -> Case:
    def run(x: Any, ws: Any) -> Any:
        return lax.scan(lambda c, w: (jnp.sin(c @ w), None), x, ws, reverse=True, unroll=2)[0]

    return Case(fn=run, args=(ramp(), _stack()))


@registered
def vjp_scan_of_scan() -> Case:
    def run(x: Any, ws: Any) -> Any:
        def outer(c: Any, w: Any) -> Any:
            return lax.scan(lambda d, row: (jnp.sin(d * row), d.sum()), c, w)

        return lax.scan(outer, x, ws)

    return Case(fn=run, args=(ramp(), _stack(3)), jit=True, saveable_args=(True, False))


@registered
def vjp_scan_without_steps() -> Case:
    def run(x: Any, ws: Any) -> Any:
        return lax.scan(lambda c, w: (jnp.sin(c @ w), c), x, ws)

    return Case(fn=run, args=(ramp(), jnp.zeros((0, 4, 4))))


@registered
def vjp_cond() -> Case:
    def branch(x: Any, p: Any) -> Any:
        return lax.cond(p, lambda x: jnp.sin(x), lambda x: x * x + 3 * x, x)

    return Case(fn=branch, args=(ramp(), jnp.array(True)))


@registered
def vjp_cond_false() -> Case:
    def branch(w: Any, x: Any, p: Any) -> Any:
        return lax.cond(p, lambda w, x: jnp.sin(x @ w), lambda w, x: jnp.tanh(w @ x) * x, w, x)

    return Case(
        fn=branch, args=(matrix(), ramp(), jnp.array(False)), saveable_args=(False, True, True), jit=True
    )


def _switched(x: Any, index: Any) -> Any:
    branches = [lambda x: jnp.sin(x), lambda x: x * x * x, lambda x: jnp.exp(x) * x, lambda x: x]
    return lax.switch(index, branches, x)


@registered
def vjp_switch() -> Case:
    return Case(fn=_switched, args=(ramp(), jnp.int32(2)))


@registered
def vjp_switch_jit() -> Case:
    return Case(fn=_switched, args=(ramp(), jnp.int32(1)), jit=True)


@registered
def vjp_cond_in_scan() -> Case:
    def run(x: Any, ws: Any) -> Any:
        def body(c: Any, w: Any) -> Any:
            return lax.cond(c.sum() > 1, lambda c: jnp.tanh(c @ w), lambda c: c + w.sum(0), c), None

        return lax.scan(body, x, ws)[0]

    return Case(fn=run, args=(ramp(), _stack()), jit=True)


@registered
def vjp_fori_loop() -> Case:
    return Case(fn=lambda x: lax.fori_loop(0, 3, lambda i, c: jnp.sin(c) * (i + 1), x), args=(ramp(),))


@registered
def vjp_map() -> Case:
    return Case(fn=lambda xs, w: lax.map(lambda x: jnp.sin(x @ w), xs), args=(matrix(3, 4), matrix()))


@registered
def vjp_vmapped_cond() -> Case:
    def chosen(xs: Any, ps: Any) -> Any:
        return jax.vmap(lambda x, p: lax.cond(p, jnp.sin, lambda x: x * x, x))(xs, ps)

    return Case(fn=chosen, args=(matrix(2, 4), jnp.array([True, False])))
