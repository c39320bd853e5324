"""Derivative rules of the user's own, and what they may save or call."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from tests.cases.case import Case, matrix, ramp, registered


@jax.custom_vjp
def weighted_sine(x: Any, w: Any) -> Any:
    """Its residuals are a dict that also holds what is not an array."""
    return jnp.sin(x) * w


def _weighted_sine_fwd(x: Any, w: Any) -> Any:
    saved = {"cos": jnp.cos(x), "w": w, "none": None, "n": 3, "flag": True, "": {"deep": (x,)}}
    return weighted_sine(x, w), saved


def _weighted_sine_bwd(saved: Any, g: Any) -> Any:
    scale = 2.0 if saved["flag"] else 1.0
    return g * saved["cos"] * saved["w"] * scale, g * saved["n"] + saved[""]["deep"][0] * 0


weighted_sine.defvjp(_weighted_sine_fwd, _weighted_sine_bwd)


@registered
def vjp_custom_vjp_dict_residuals() -> Case:
    return Case(fn=weighted_sine, args=(ramp(), ramp() * 2))


@registered
def vjp_custom_vjp_dict_residuals_jit() -> Case:
    return Case(fn=weighted_sine, args=(ramp(), ramp() * 2), jit=True)


@jax.custom_vjp
def sine_squared(x: Any) -> Any:
    """Its residual is a VJP object."""
    return jnp.sin(x) ** 2


sine_squared.defvjp(lambda x: jax.vjp(lambda t: jnp.sin(t) ** 2, x), lambda inner, g: inner(g))


@registered
def vjp_custom_vjp_that_saves_a_vjp() -> Case:
    return Case(fn=sine_squared, args=(ramp(),))


@registered
def vjp_custom_vjp_that_saves_a_vjp_jit() -> Case:
    return Case(fn=lambda x: sine_squared(x) * x, args=(ramp(),), jit=True)


@jax.custom_jvp
def softplus(x: Any) -> Any:
    """A forward-mode rule."""
    return jnp.log1p(jnp.exp(x))


softplus.defjvp(lambda primals, tangents: (softplus(primals[0]), jax.nn.sigmoid(primals[0]) * tangents[0]))


@registered
def vjp_custom_jvp() -> Case:
    return Case(fn=softplus, args=(ramp(),))


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def clipped_gradient(x: Any, limit: float) -> Any:
    """An argument of the rule that is a Python value."""
    return x * x


clipped_gradient.defvjp(
    lambda x, limit: (clipped_gradient(x, limit), x),
    lambda limit, x, g: (jnp.clip(2 * g * x, -limit, limit),),
)


@registered
def vjp_custom_vjp_nondiff_argument() -> Case:
    return Case(fn=lambda x: clipped_gradient(jnp.sin(x), 0.3), args=(ramp(),))


class Saved(NamedTuple):
    """Residuals with names."""

    x: Any
    half: Any


@jax.custom_vjp
def halved(x: Any) -> Any:
    """Its residuals are a NamedTuple, one of them with fewer bits."""
    return jnp.sin(x)


halved.defvjp(
    lambda x: (halved(x), Saved(x, jnp.cos(x).astype(jnp.bfloat16))),
    lambda saved, g: (g * saved.half.astype(g.dtype) + 0 * saved.x,),
)


@registered
def vjp_custom_vjp_namedtuple_residuals() -> Case:
    return Case(fn=halved, args=(ramp(),))


@registered
def vjp_custom_vjp_constant_in_the_rule() -> Case:
    big = jnp.asarray(np.random.default_rng(0).normal(size=(64, 64)).astype(np.float32))

    @jax.custom_vjp
    def projected(x: Any) -> Any:
        return x @ big

    projected.defvjp(lambda x: (projected(x), None), lambda _, g: (g @ big.T,))
    return Case(fn=projected, args=(ramp(64),), leaves=0)


@jax.custom_vjp
def repeated_sine(x: Any) -> Any:
    """A loop of unknown length, which JAX cannot differentiate by itself."""
    return jax.lax.while_loop(lambda c: c[0] < 3, lambda c: (c[0] + 1, jnp.sin(c[1])), (0, x))[1]


def _repeated_sine_bwd(x: Any, g: Any) -> Any:
    def step(carry: Any) -> Any:
        number, gradient = carry
        inner = jax.lax.fori_loop(0, 2 - number, lambda _, v: jnp.sin(v), x)
        return number + 1, gradient * jnp.cos(inner)

    return (jax.lax.while_loop(lambda c: c[0] < 3, step, (0, g))[1],)


repeated_sine.defvjp(lambda x: (repeated_sine(x), x), _repeated_sine_bwd)


@registered
def vjp_while_inside_custom_vjp() -> Case:
    return Case(fn=lambda x: repeated_sine(x) * x, args=(ramp(),))


@registered
def vjp_scan_of_custom_vjp() -> Case:
    def run(x: Any, ws: Any) -> Any:
        return jax.lax.scan(lambda c, w: (weighted_sine(c, w), c), x, ws)

    return Case(fn=run, args=(ramp(), matrix(3, 4)), jit=True)


@jax.custom_vjp
def on_the_host(x: Any) -> Any:
    """Its backward calls Python on the host."""
    return jnp.sin(x)


def _on_the_host_bwd(x: Any, g: Any) -> Any:
    cosine = jax.pure_callback(lambda v: np.cos(v), jax.ShapeDtypeStruct(x.shape, x.dtype), x)
    return (g * cosine,)


on_the_host.defvjp(lambda x: (on_the_host(x), x), _on_the_host_bwd)


@registered
def vjp_pure_callback_in_the_backward() -> Case:
    return Case(fn=on_the_host, args=(ramp(),), export_fails="callback")


@registered
def vjp_pure_callback_in_the_backward_jit() -> Case:
    return Case(fn=on_the_host, args=(ramp(),), jit=True, export_fails="callback")


@registered
def vjp_pure_callback_in_the_forward() -> Case:
    def called(x: Any) -> Any:
        shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
        constant = jax.pure_callback(lambda v: np.sin(v), shape, jax.lax.stop_gradient(x))
        return constant * x * x

    return Case(fn=called, args=(ramp(),))


@registered
def vjp_custom_linear_solve() -> Case:
    a = matrix() + 4 * jnp.eye(4)

    def solved(a: Any, b: Any) -> Any:
        solve = functools.partial(jnp.linalg.solve, a)
        return jax.lax.custom_linear_solve(
            lambda v: a @ v, b, lambda _, v: solve(v), lambda _, v: jnp.linalg.solve(a.T, v)
        )

    return Case(fn=solved, args=(a, ramp()))
