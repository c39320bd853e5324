"""Structured residuals, the third channel, which keeps the tree that a rule saves."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.hijax import HiPrim

from tests.cases.case import Case, matrix, ramp, registered


class SineTimes(HiPrim):
    """sin(a) * b, with a residual tree that holds one array twice and the argument b as it is."""

    def __init__(self, a: Any, b: Any) -> None:
        self.in_avals, self.out_aval, self.params = (a, b), a, {}
        super().__init__()  # type: ignore[no-untyped-call]

    def expand(self, a: Any, b: Any) -> Any:
        return jnp.sin(a) * b

    def vjp_fwd(self, _: Any, a: Any, b: Any) -> Any:
        cosine = jnp.cos(a)
        return self(a, b), (), True, {"z_cos": cosine, "again": cosine, "b": b, "t": (jnp.sin(a), None)}

    def vjp_bwd(self, _: Any, saved: Any, g: Any, a_sum: Any, b_sum: Any) -> None:
        a_sum.accum(g * 0.5 * (saved["z_cos"] + saved["again"]) * saved["b"])
        b_sum.accum(g * saved["t"][0])


def sine_times(a: Any, b: Any) -> Any:
    """sin(a) * b by the rule above."""
    return SineTimes(jax.typeof(a), jax.typeof(b))(a, b)


def _squared(a: Any, b: Any) -> Any:
    return jnp.sum(sine_times(a, b) ** 2)


@registered
def structured_residuals() -> Case:
    return Case(fn=_squared, args=(ramp(), ramp() * 2), leaves=5)


@registered
def structured_residuals_jit() -> Case:
    # The jitted function returns the residual dict sorted, the eager one as the rule wrote it.
    return Case(fn=_squared, args=(ramp(), ramp() * 2), jit=True)


@registered
def structured_residuals_not_saveable() -> Case:
    return Case(fn=_squared, args=(ramp(), ramp() * 2), saveable_args=False)


@registered
def structured_residuals_scan() -> Case:
    def run(c: Any, ws: Any) -> Any:
        return jax.lax.scan(lambda c, w: (sine_times(c, w), None), c, ws)[0].sum()

    return Case(fn=run, args=(ramp(), matrix(3, 4)))


def _either(a: Any, p: Any) -> Any:
    return jax.lax.cond(p, lambda a: sine_times(a, a).sum(), lambda a: (a * 2).sum(), a)


@registered
def structured_residuals_cond() -> Case:
    return Case(fn=_either, args=(ramp(), jnp.array(True)))


@registered
def structured_residuals_cond_false_jit() -> Case:
    return Case(fn=_either, args=(ramp(), jnp.array(False)), jit=True)
