"""`Client.fwd_and_bwd`: what `jax.fwd_and_bwd` gives, with the store in between."""

from __future__ import annotations

import gc
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import residual_client as rc
from tests.client.bits import bits_of

W = jnp.linspace(-1, 1, 64).reshape(8, 8)
x = jnp.linspace(0, 1, 32).reshape(4, 8)


def layer(W: Any, x: Any, scale: Any = 1.0, *, shift: Any = 0.0) -> Any:  # noqa: N803 - as in the formulas
    return jnp.tanh(x @ W * scale + shift)


def with_aux(W: Any, x: Any) -> Any:  # noqa: N803
    y = layer(W, x)
    return y, {"mean": jnp.mean(y)}


@pytest.mark.parametrize(
    ("argnums", "jitted"),
    [(0, True), ((0, 1), True), ((1, 0), True), (-2, True), ([0, 2], True), ((0, 1), False)],
    ids=str,
)
def test_it_gives_what_jax_gives(argnums: Any, jitted: bool, client: rc.Client) -> None:
    """Outputs and gradients are those of `jax.fwd_and_bwd` bit for bit, in its order and structure."""
    ours = client.fwd_and_bwd(layer, argnums, False, jitted)
    # jax 0.11.2 drops keywords without a word, so JAX gets a function that needs none.
    theirs = jax.fwd_and_bwd(lambda *args, **_: layer(*args, shift=0.5), argnums, False, jitted)
    results = []
    for fwd, bwd in (ours, theirs):
        y, residuals = fwd(W, x, 2.0, shift=0.5)
        results.append((y, bwd(residuals, jnp.cos(y))))
    assert bits_of(results[0]) == bits_of(results[1])


def test_auxiliary_output_comes_third(client: rc.Client) -> None:
    """With ``has_aux`` the forward returns the outputs, the residuals and the rest, as JAX does."""
    fwd, bwd = client.fwd_and_bwd(with_aux, (0, 1), has_aux=True)
    y, residuals, aux = fwd(W, x)
    fwd, plain = jax.fwd_and_bwd(with_aux, (0, 1), has_aux=True)
    y_plain, f_vjp, aux_plain = fwd(W, x)
    assert bits_of((y, aux, bwd(residuals, y))) == bits_of((y_plain, aux_plain, plain(f_vjp, y)))


def test_it_is_traced_once_for_all_steps(client: rc.Client) -> None:
    """Twenty steps trace the function once, residuals serve twice, and their bundles go with them."""
    traces = []

    def counted(W: Any, x: Any) -> Any:  # noqa: N803
        traces.append(None)
        return layer(W, x)

    fwd, bwd = client.fwd_and_bwd(counted, (0, 1), saveable_args=(False, True))
    for step in range(20):
        y, residuals = fwd(W, x + step)
        assert bits_of(bwd(residuals, y)) == bits_of(bwd(residuals, y))
    assert len(traces) == 1
    del residuals
    gc.collect()
    client.offload(jax.vjp(jnp.sin, x)[1])
    assert len(client.store.list(prefix="scratch/").entries) <= 1


def test_what_is_not_saved_is_the_value_of_the_forward(any_client: rc.Client) -> None:
    """Weights that are not saveable are not stored, and a numpy buffer that changes later changes no gradient."""
    weights = np.array(W)
    fwd, bwd = any_client.fwd_and_bwd(with_aux, (0, 1), has_aux=True, saveable_args=(False, True))
    y, residuals, _ = fwd(weights, x)
    residuals.handle.wait()
    kept = any_client.store.get(residuals.handle.key).manifest
    assert [argument.state for argument in kept.arguments] == ["not_saveable", "saved"]
    weights[...] = 0
    expected = jax.vjp(layer, W, x)[1](y)
    for one, other in zip(bwd(residuals, y), expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-6)


@pytest.mark.parametrize("argnums", [3, -4, (0, 0), (0, -3)], ids=str)
def test_argnums_that_name_no_argument_are_refused(argnums: Any, client: rc.Client) -> None:
    """A position that is not there, or one that is named twice."""
    fwd, _ = client.fwd_and_bwd(layer, argnums)
    with pytest.raises(ValueError, match="argnums"):
        fwd(W, x, 2.0)


def test_arguments_of_the_backward_in_the_wrong_order(client: rc.Client) -> None:
    """The cotangent is named as what is no residuals, and neither shows whole arrays."""
    fwd, bwd = client.fwd_and_bwd(jnp.sin, 0)
    y, residuals = fwd(jnp.ones(3))
    with pytest.raises(TypeError, match="the residuals of fwd and then the cotangent"):
        bwd(y, residuals)
    assert "Array" not in repr(residuals)


def test_a_forward_under_jit_is_refused(client: rc.Client) -> None:
    """Its residuals have no values there, and the error says so."""
    fwd, _ = client.fwd_and_bwd(layer, 0)
    with pytest.raises(rc.errors.LeafUnavailable, match="is being traced"):
        jax.jit(lambda W, x: fwd(W, x)[0])(W, x)  # noqa: N803
