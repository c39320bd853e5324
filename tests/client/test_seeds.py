"""What the documentation of first-class VJPs and of saved residuals shows, done with a store in between."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.tree_util import tree_leaves, tree_map

import residual_client as rc
from tests.client.bits import bits_of


def layer(w: Any, x: Any) -> Any:
    return jnp.tanh(x @ w)


W1, W2 = jnp.ones((3, 3)), 2.0 * jnp.ones((3, 3))
X0 = jnp.ones((2, 3))


def two_layers(w1: Any, w2: Any, x: Any) -> Any:
    return jnp.sum(layer(w2, layer(w1, x)))


def references() -> tuple[Any, Any]:
    """The end-to-end gradients of the two weights."""
    gradients: tuple[Any, Any] = jax.grad(two_layers, argnums=(0, 1))(W1, W2, X0)
    return gradients


# Splitting the forward and backward passes


def test_a_pipeline_of_two_jitted_layers(any_client: rc.Client) -> None:
    """Forward through two layers, then backward from the store on a schedule of one's own: the gradients of jax.grad."""
    forward = jax.jit(lambda w, x: jax.vjp(layer, w, x))
    backward = jax.jit(lambda f_vjp, y_bar: f_vjp(y_bar))
    x1, residuals1 = forward(W1, X0)
    handle1 = any_client.offload(residuals1, "test/layer-1")
    x2, residuals2 = forward(W2, x1)
    handle2 = any_client.offload(residuals2, "test/layer-2")
    del residuals1, residuals2
    dw2, dx1 = backward(any_client.restore(handle2), jnp.ones_like(x2))
    dw1, dx0 = backward(any_client.restore(handle1), dx1)
    dw1_ref, dw2_ref = references()
    assert jnp.allclose(dw1, dw1_ref)
    assert jnp.allclose(dw2, dw2_ref)
    assert dx0.shape == X0.shape


def test_a_pipeline_whose_weights_stay_at_home(any_client: rc.Client) -> None:
    """With saveable_args the weights are left out of what is stored, and are given to the backward instead."""
    forward = jax.jit(lambda w, x: jax.vjp(layer, w, x, saveable_args=(False, True)))
    backward = jax.jit(lambda f_vjp, y_bar: f_vjp(y_bar))
    x1, residuals1 = forward(W1, X0)
    x2, residuals2 = forward(W2, x1)
    handles = [any_client.offload(one) for one in (residuals1, residuals2)]
    assert [handle.wait().leaves for handle in handles] == [2, 2]
    dw2, dx1 = backward(any_client.restore(handles[1], args=(W2, None)), jnp.ones_like(x2))
    dw1, _ = backward(any_client.restore(handles[0], args=(W1, None)), dx1)
    dw1_ref, dw2_ref = references()
    assert jnp.allclose(dw1, dw1_ref)
    assert jnp.allclose(dw2, dw2_ref)


def test_a_pipeline_that_restores_inside_of_the_jitted_backward(any_client: rc.Client) -> None:
    """A VJP object that still lacks its weights goes into jit, and is completed there, as the documentation does."""
    forward = jax.jit(lambda w, x: jax.vjp(layer, w, x, saveable_args=(False, True)))

    @jax.jit
    def backward(f_vjp: Any, w: Any, y_bar: Any) -> Any:
        f_vjp.args_res[0] = w
        return f_vjp(y_bar)

    x1, residuals1 = forward(W1, X0)
    x2, residuals2 = forward(W2, x1)
    handles = [any_client.offload(one) for one in (residuals1, residuals2)]
    dw2, dx1 = backward(any_client.restore(handles[1]), W2, jnp.ones_like(x2))
    dw1, _ = backward(any_client.restore(handles[0]), W1, dx1)
    dw1_ref, dw2_ref = references()
    assert jnp.allclose(dw1, dw1_ref)
    assert jnp.allclose(dw2, dw2_ref)


def test_fwd_and_bwd_of_jax(any_client: rc.Client) -> None:
    """The residuals of jax.fwd_and_bwd are a VJP object like any other, and its backward takes the restored one."""
    fwd, bwd = jax.fwd_and_bwd(layer, argnums=(0, 1))
    y, residuals = fwd(W1, X0)
    wanted = bwd(residuals, jnp.ones_like(y))
    any_client.offload(residuals, "test/fwd-and-bwd").wait()
    restored = any_client.restore("test/fwd-and-bwd")
    assert bits_of(bwd(restored, jnp.ones_like(y))) == bits_of(wanted)
    assert [one.shape for one in wanted] == [(3, 3), (2, 3)]


def test_fwd_and_bwd_of_one_argument(any_client: rc.Client) -> None:
    """With argnums the others are closed over, so the weights travel as a residual of their own."""
    fwd, bwd = jax.fwd_and_bwd(layer, argnums=1)
    y, residuals = fwd(W2, X0)
    handle = any_client.offload(residuals)
    assert bits_of(bwd(any_client.restore(handle), y)) == bits_of(bwd(residuals, y))


# What the VJP object saves


def test_args_res_mirrors_the_arguments(any_client: rc.Client) -> None:
    """The three attributes of a restored VJP object are those of the one that was stored."""
    y, f_vjp = jax.vjp(layer, W1, X0)
    restored = any_client.restore(any_client.offload(f_vjp))
    for name in ("args_res", "opaque_residuals", "structured_residuals"):
        assert bits_of(getattr(restored, name)) == bits_of(getattr(f_vjp, name))
    assert restored.jaxpr is f_vjp.jaxpr
    assert restored.out_nzs == f_vjp.out_nzs
    assert y.shape == (2, 3)


def test_sentinels_have_no_leaves(any_client: rc.Client) -> None:
    """Two leaves instead of three are stored, and three states are told apart: saved, not saveable, not needed."""
    f_vjp: Any = jax.vjp(layer, W1, X0, saveable_args=(False, True))[1]
    receipt = any_client.offload(f_vjp).wait()
    assert receipt.leaves == len(tree_leaves(f_vjp)) == 2
    assert any_client.offload(jax.vjp(layer, W1, X0)[1]).wait().leaves == 3
    restored = any_client.restore(any_client.offload(f_vjp, "test/sentinels"))
    assert re.match(r"\[NotSaveable\(\), Array", str(restored.args_res))
    unneeded: Any = jax.vjp(lambda a, b: a + b * b, X0, X0 * 2, saveable_args=(False, False))[1]
    restored = any_client.restore(any_client.offload(unneeded))
    assert str(restored.args_res) == str(unneeded.args_res) == "[NotNeeded(), NotSaveable()]"


# Restoring before the backward pass


def test_the_error_of_a_forgotten_restore_names_the_argument(any_client: rc.Client) -> None:
    """JAX's error is that of the original: the position, and the function with its line."""
    y, f_vjp = jax.vjp(layer, W1, X0, saveable_args=(False, True))
    restored = any_client.restore(any_client.offload(f_vjp))
    with pytest.raises(ValueError, match="applied before restoring its not-saveable residuals") as error:
        restored(jnp.ones_like(y))
    place = rf"the argument at position args\[0\] of the differentiated function layer at .*{Path(__file__).name}:\d+"
    assert re.search(place, str(error.value))


def test_the_ways_to_restore_by_hand(any_client: rc.Client) -> None:
    """Assignment into args_res and replace work on a restored VJP object as they do on the original."""
    y, f_vjp = jax.vjp(layer, W1, X0, saveable_args=(False, True))
    handle = any_client.offload(f_vjp)
    wanted = bits_of(jax.vjp(layer, W1, X0)[1](jnp.ones_like(y)))
    assigned = any_client.restore(handle)
    assigned.args_res[0] = W1
    assert bits_of(assigned(jnp.ones_like(y))) == wanted
    restored = any_client.restore(handle)
    replaced = restored.replace(args_res=[W1, restored.args_res[1]])
    assert bits_of(replaced(jnp.ones_like(y))) == wanted
    assert type(restored.args_res[0]).__name__ == "NotSaveable"
    given = any_client.restore(handle, args=(W1, X0))
    assert bits_of(given(jnp.ones_like(y))) == wanted


def _product(d: Any) -> Any:
    return d["bye"] @ d["hi"]


def test_a_tuple_prefix_lines_up_with_a_dict(any_client: rc.Client) -> None:
    """Flags in a tuple are for the sorted keys of a dict, and the original dict restores what they left out."""
    d = {"hi": jnp.ones((4, 5)), "bye": jnp.ones((3, 4))}
    g_vjp = jax.vjp(_product, d, saveable_args=((True, False),))[1]
    any_client.offload(g_vjp, "test/prefix").wait()
    states = {one.path: one.state for one in any_client.store.manifest("test/prefix").arguments}
    assert states == {"args[0]['bye']": "saved", "args[0]['hi']": "not_saveable"}
    wanted = bits_of(jax.vjp(_product, d)[1](jnp.ones((3, 5))))
    restored = any_client.restore("test/prefix", args=(d,))
    (gradient,) = restored(jnp.ones((3, 5)))
    assert tree_map(jnp.shape, gradient) == {"bye": (3, 4), "hi": (4, 5)}
    assert bits_of((gradient,)) == wanted
    by_hand = any_client.restore("test/prefix")
    by_hand.args_res = [d]
    assert bits_of(by_hand(jnp.ones((3, 5)))) == wanted


def test_what_is_computed_from_an_argument_is_saved_all_the_same(any_client: rc.Client) -> None:
    """saveable_args never recomputes: a residual that was computed from the weights is stored, and nothing is missing."""
    f_vjp: Any = jax.vjp(lambda w, x: x @ jnp.sin(w), W1, X0, saveable_args=(False, True))[1]
    handle = any_client.offload(f_vjp)
    y_bar = jnp.ones((2, 3))
    assert handle.wait().leaves == len(tree_leaves(f_vjp)) == 3
    restored = any_client.restore(handle)
    assert type(restored.args_res[0]).__name__ in ("NotNeeded", "NotSaveable")
    wanted = jax.vjp(lambda w, x: x @ jnp.sin(w), W1, X0)[1](y_bar)
    assert bits_of(any_client.restore(handle, args=(W1, None))(y_bar)) == bits_of(wanted)


# Accumulating into refs, logs, and auxiliary outputs


def test_with_refs_on_a_restored_vjp(any_client: rc.Client) -> None:
    """Two microbatches accumulate into one Ref, and an argument may be left out."""
    total, wanted = jax.new_ref(jnp.zeros((3, 3))), jnp.zeros((3, 3))
    for scale in (1.0, 0.5):
        y, f_vjp = jax.vjp(layer, W1, X0 * scale)
        restored = any_client.restore(any_client.offload(f_vjp))
        restored.with_refs(total, jax.ad.DontWant())(jnp.ones_like(y))
        wanted = wanted + f_vjp(jnp.ones_like(y))[0]
    assert bits_of(total[...]) == bits_of(wanted)


def test_with_logs_on_a_restored_vjp(any_client: rc.Client) -> None:
    """with_logs gives gradients and logs, whether it was asked for before or after the store."""
    y, f_vjp = jax.vjp(layer, W1, X0)
    wanted = bits_of(f_vjp.with_logs(y))
    assert bits_of(any_client.restore(any_client.offload(f_vjp)).with_logs(y)) == wanted
    assert bits_of(any_client.restore(any_client.offload(f_vjp.with_logs))(y)) == wanted


def test_an_auxiliary_output_stays_here(any_client: rc.Client) -> None:
    """has_aux concerns the forward alone: the cotangent is that of the first output."""
    y, f_vjp, aux = jax.vjp(lambda w, x: (layer(w, x), {"name": "text", "x": x}), W1, X0, has_aux=True)
    assert aux["name"] == "text"
    assert bits_of(any_client.restore(any_client.offload(f_vjp))(y)) == bits_of(jax.vjp(layer, W1, X0)[1](y))


# A rule that saves more than its argument


@jax.custom_vjp
def weighted(x: Any) -> Any:
    """sum(x * sin(x)), with the sine saved."""
    return jnp.sum(x * jnp.sin(x))


def weighted_fwd(x: Any) -> Any:
    sine = jnp.sin(x)
    return jnp.sum(x * sine), (x, sine)


def weighted_bwd(residuals: Any, g: Any) -> Any:
    x, sine = residuals
    return (g * (sine + x * jnp.cos(x)),)


weighted.defvjp(weighted_fwd, weighted_bwd)


@pytest.mark.parametrize("jit", [False, True])
def test_a_rule_that_saves_the_sine(any_client: rc.Client, jit: bool) -> None:
    """Both residuals are stored, and the gradient is linear in the cotangent, with and without the source."""
    x = jnp.array([0.0, 1.0, 2.0])
    forward = jax.jit(lambda x: jax.vjp(weighted, x)) if jit else lambda x: jax.vjp(weighted, x)
    value, f_vjp = forward(x)
    handle = any_client.offload(f_vjp, "test/weighted")
    assert handle.wait().leaves == 2
    expected = jnp.array([0.0, 1.3817732, 0.0770037])
    for apply in (any_client.restore(handle), any_client.backward("test/weighted")):
        assert jnp.allclose(apply(jnp.ones_like(value))[0], expected, atol=1e-6)
        assert jnp.allclose(apply(jnp.float32(2.0))[0], 2 * expected, atol=1e-6)
        assert apply(jnp.float32(1.0))[0].dtype == jnp.float32
    assert bits_of(any_client.restore(handle)(jnp.float32(1.0))[0]) == bits_of(jax.grad(weighted)(x))


def test_a_forward_and_a_backward_that_need_the_same_value(any_client: rc.Client) -> None:
    """The forward value that a rule needs again is saved once and stored, so the backward need not compute it anew."""

    @jax.custom_vjp
    def expensive(x: Any) -> Any:
        return jnp.sin(x)

    expensive.defvjp(lambda x: (expensive(x), expensive(x)), lambda value, v: (value * jnp.sin(v),))
    value, f_vjp = jax.vjp(expensive, jnp.float32(1.0))
    restored = any_client.restore(any_client.offload(f_vjp))
    assert bits_of(restored(value)) == bits_of(f_vjp(value))
    assert bits_of(tree_leaves(restored)) == bits_of([value])
