"""How `jax.vjp` is called: what may be saved, what is a literal, what comes by closure."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tests.cases.case import Case, matrix, ramp, registered


def layer(w: Any, x: Any) -> Any:
    """One dense layer."""
    return jnp.tanh(x @ w)


@registered
def vjp_plain_layer() -> Case:
    return Case(fn=layer, args=(matrix(), ramp()), leaves=3)


@registered
def vjp_weights_not_saveable() -> Case:
    return Case(fn=layer, args=(matrix(), ramp()), saveable_args=(False, True), leaves=2)


@registered
def vjp_jit() -> Case:
    return Case(fn=layer, args=(matrix(), ramp()), jit=True)


@registered
def vjp_jit_not_saveable() -> Case:
    return Case(fn=layer, args=(matrix(), ramp()), saveable_args=(False, True), jit=True, leaves=2)


@registered
def vjp_of_jitted_fn() -> Case:
    return Case(fn=jax.jit(layer), args=(matrix(), ramp()), saveable_args=(False, True))


@registered
def vjp_nested_prefix() -> Case:
    params = {"enc": {"w": matrix(), "b": ramp()}, "dec": [matrix(scale=0.2), matrix(scale=0.05)]}

    def model(p: Any, x: Any) -> Any:
        h = jnp.tanh(x @ p["enc"]["w"] + p["enc"]["b"])
        return (
            (jnp.sum(h @ p["dec"][0]) * 2) @ p["dec"][1] if False else jnp.sum(h @ p["dec"][0]) * p["dec"][1]
        )

    # Dicts flatten sorted by key, so the tuple's first entry is for "dec".
    return Case(fn=model, args=(params, ramp()), saveable_args=(((True, False), False), True))


@registered
def vjp_tuple_prefix_on_dict() -> Case:
    params = {"hi": matrix(4, 5), "bye": matrix(3, 4)}
    return Case(fn=lambda d: d["bye"] @ d["hi"], args=(params,), saveable_args=((True, False),), leaves=1)


@registered
def vjp_not_needed_args() -> Case:
    return Case(
        fn=lambda a, b, c: a + jnp.sin(b) + b * b + 2 * c,
        args=(ramp(), ramp() * 2, ramp() * 3),
        saveable_args=(False, True, False),
    )


@registered
def vjp_unused_argument() -> Case:
    return Case(
        fn=lambda a, unused, b: jnp.sin(a) * b, args=(ramp(), matrix(), ramp() * 2), saveable_args=False
    )


@registered
def vjp_closure_weights() -> Case:
    w = matrix()
    return Case(fn=lambda x: jnp.tanh(x @ w), args=(ramp(),), saveable_args=False)


@registered
def vjp_closure_numpy_const() -> Case:
    scale = np.linspace(0.5, 2.0, 4, dtype=np.float32)
    return Case(fn=lambda x: jnp.sin(x * scale) * x, args=(ramp(),))


@registered
def vjp_numpy_args() -> Case:
    args = (np.arange(4, dtype=np.float32), np.ones(4, np.float32) * 3)
    return Case(fn=lambda a, b: a * b, args=args)


@registered
def vjp_numpy_args_not_saveable() -> Case:
    args = (np.arange(4, dtype=np.float32), np.arange(4, dtype=np.float32) * 3)
    return Case(fn=lambda a, b: a * b, args=args, saveable_args=False, leaves=0)


@registered
def vjp_python_scalar_args() -> Case:
    return Case(fn=lambda a, b: a * b, args=(2.0, 3.0), leaves=0)


@registered
def vjp_python_scalar_args_jit() -> Case:
    return Case(fn=lambda a, b: a * b, args=(2.0, 3.0), jit=True, leaves=2)


@registered
def vjp_np_scalar_arg() -> Case:
    return Case(fn=lambda a, x: jnp.sin(x * a), args=(np.float32(1.5), ramp()))


@registered
def vjp_python_scalar_among_arrays() -> Case:
    return Case(
        fn=lambda x, a, n: jnp.sin(x * a) ** n, args=(ramp(), 1.5, 3), saveable_args=(False, False, True)
    )


def _branching(a: Any) -> Any:
    return a * 2 if a > 0 else jnp.exp(a)


@registered
def vjp_python_branch_positive() -> Case:
    return Case(fn=_branching, args=(jnp.float32(1.0),))


@registered
def vjp_python_branch_negative() -> Case:
    return Case(fn=_branching, args=(jnp.float32(-1.0),))


@registered
def vjp_has_aux() -> Case:
    return Case(fn=lambda x: (jnp.sin(x) * x, {"m": x * 2, "s": "text"}), args=(ramp(),), has_aux=True)


@registered
def vjp_partial_argnums() -> Case:
    def scaled(w: Any, x: Any, n: int) -> Any:
        return layer(w, x) * n

    return Case(fn=functools.partial(scaled, n=3), args=(matrix(), ramp()), saveable_args=(False, True))


@registered
def vjp_dict_output() -> Case:
    return Case(fn=lambda x: {"b": jnp.sin(x), "a": (x * x, None), "unused": jnp.ones(2)}, args=(ramp(),))


@registered
def vjp_constant_output() -> Case:
    return Case(fn=lambda x: (jnp.ones(3), x.shape[0] * 1.0), args=(ramp(),), leaves=0)


@registered
def vjp_stop_gradient() -> Case:
    return Case(fn=lambda x, t: jnp.sum((x - jax.lax.stop_gradient(t * x)) ** 2), args=(ramp(), ramp() * 3))


@registered
def vjp_in_nzs() -> Case:
    return Case(
        fn=lambda a, b: (jnp.sin(a) * b, a * 2),
        args=(ramp(), ramp() * 2),
        in_nzs=(False, True),
        saveable_args=(False, True),
    )


@registered
def vjp_in_nzs_all_zero() -> Case:
    return Case(fn=lambda a, b: jnp.sin(a) * b, args=(ramp(), ramp() * 2), in_nzs=False, leaves=0)
