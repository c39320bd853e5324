"""Identity of a backward that reads other inputs: equal operations on another residual are another program."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import residual_client as rc
from residual_store.errors import BundleReplaced, ProgramMismatch
from tests.client.bits import bits_of

X = jnp.arange(1.0, 5.0)


def _rule(index: int) -> Callable[[Any], Any]:
    """A function whose backward reads one of two saved arrays of the same shape."""

    @jax.custom_vjp
    def f(x: Any) -> Any:
        return jnp.sin(x)

    f.defvjp(lambda x: (f(x), (x, 100 * x)), lambda saved, g: (g * saved[index],))
    return f


_PAIRS: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "another residual": (_rule(0), _rule(1)),
    "another output": (lambda x: (jnp.sin(x), 0 * X), lambda x: (0 * X, jnp.sin(x))),
    "another key of the output": (
        lambda x: {"loss": jnp.sin(x), "reg": 0 * X},
        lambda x: {"loss": 0 * X, "reg": jnp.sin(x)},
    ),
}


@pytest.mark.parametrize("pair", _PAIRS)
def test_a_backward_that_reads_another_input_is_another_program(pair: str) -> None:
    """JAX drops unused inputs and numbers the rest, so the operations alone would be equal; they are told apart."""
    one, other = (jax.vjp(f, X) for f in _PAIRS[pair])
    with rc.connect("memory://") as client:
        client.offload(one[1], "run/one").wait()
        with pytest.raises(ProgramMismatch, match="'run/one'"):
            rc.Client(client.store).restore("run/one", like=other[1])


@pytest.mark.parametrize("pair", _PAIRS)
def test_two_such_backwards_of_one_process_are_kept_apart(pair: str) -> None:
    """Each bundle is applied with its own program, although both are offloaded by one client."""
    with rc.connect("memory://") as client:
        for name, f in zip(("run/one", "run/other"), _PAIRS[pair], strict=True):
            y, vjp = jax.vjp(f, X)
            cotangent = jax.tree.map(jnp.ones_like, y)
            client.offload(vjp, name).wait()
            wanted = jax.jit(lambda f_vjp, ct: f_vjp(ct))(vjp, cotangent)
            assert bits_of(client.backward(name)(cotangent)) == bits_of(wanted)


def test_a_handle_reaches_its_own_bundle_alone() -> None:
    """After a replacement both restore and backward refuse the old handle, and the key gives the new bundle."""
    with rc.connect("memory://") as client:
        forward = jax.jit(lambda x: jax.vjp(lambda x: x * x, x)[1])
        handle = client.offload(forward(X), "run/one")
        client.offload(forward(2 * X), "run/one", if_exists="replace").wait()
        for call in (client.restore, client.backward):
            with pytest.raises(BundleReplaced, match="'run/one'"):
                call(handle)
        assert bits_of(client.backward("run/one")(jnp.ones(4))) == bits_of((4 * X,))
