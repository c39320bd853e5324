"""Leaves that cannot be read, leaves that change, and what is no leaf: named at the call, or stored as it was."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.tree_util import tree_leaves

import residual_client as rc
from residual_store.errors import LeafUnavailable, ProgramMismatch, ProgramUnavailable
from tests.cases.arguments import layer
from tests.cases.case import matrix, ramp
from tests.cases.sharded import mesh_of, spread
from tests.client.bits import bits_of


@pytest.mark.parametrize("key", [None, "run/donated"])
def test_a_donated_leaf_is_named_at_the_call(client: rc.Client, key: str | None) -> None:
    """A leaf whose buffer was given away is refused by its path, and not in a thread later on."""
    w, x = {"w": matrix() + 0}, ramp()
    vjp: Any = jax.vjp(lambda p, x: layer(p["w"], x), w, x)[1]
    jax.jit(lambda w: w + 1, donate_argnums=0)(w["w"])
    with pytest.raises(LeafUnavailable, match=r"args\[0\]\['w'\] was deleted or donated") as refusal:
        client.offload(vjp, key).wait()
    assert refusal.value.fields["leaf"] == "args[0]['w']"


@pytest.mark.parametrize("key", [None, "run/traced"])
def test_a_traced_leaf_is_named_at_the_call(client: rc.Client, key: str | None) -> None:
    """Inside of jit there are no values to store; the text says where to offload instead."""

    @jax.jit
    def step(w: Any, x: Any) -> Any:
        y, vjp = jax.vjp(layer, w, x)
        client.offload(vjp, key).wait()
        return y

    with pytest.raises(LeafUnavailable, match=r"args\[0\] is being traced.*offload it outside"):
        step(matrix(), ramp())


@pytest.mark.parametrize("key", [None, "run/abstract"])
def test_an_abstract_leaf_is_named_at_the_call(client: rc.Client, key: str | None) -> None:
    """A VJP object of shapes alone has nothing to store."""
    vjp: Any = jax.eval_shape(lambda w, x: jax.vjp(layer, w, x)[1], matrix(), ramp())
    with pytest.raises(LeafUnavailable, match=r"args\[0\] is a ShapeDtypeStruct and not an array"):
        client.offload(vjp, key).wait()


def test_an_unreduced_leaf_is_named_at_the_call(client: rc.Client) -> None:
    """A leaf that is a sum still to be made over devices has no value to read."""
    mesh = mesh_of(4)
    a, b = spread(matrix(2, 8), mesh, None, "i"), spread(matrix(8, 2), mesh, "i", None)
    partial_sums = jax.sharding.PartitionSpec(unreduced={"i"})

    @jax.custom_vjp
    def summed(a: Any, b: Any) -> Any:
        return jnp.sum(a)

    summed.defvjp(
        lambda a, b: (jnp.sum(a), jnp.einsum("ij,jk->ik", a, b, out_sharding=partial_sums)),
        lambda _, g: (jnp.zeros_like(a), jnp.zeros_like(b)),
    )
    with jax.set_mesh(mesh):
        vjp: Any = jax.jit(lambda a, b: jax.vjp(summed, a, b)[1])(a, b)
        for key in (None, "run/unreduced"):
            with pytest.raises(LeafUnavailable, match=r"opaque_residuals\[0\]"):
                client.offload(vjp, key).wait()


def test_a_numpy_buffer_that_changes_after_the_offload_changes_nothing(any_client: rc.Client) -> None:
    """JAX aliases numpy arguments; what is stored are the bytes of the moment of the call."""
    buffer = np.arange(4096, dtype=np.float32)
    vjp: Any = jax.vjp(lambda z: z * z, buffer)[1]
    handles = [any_client.offload(vjp), any_client.offload(vjp, "test/numpy")]
    buffer[:] = 0
    for handle in handles:
        assert any_client.restore(handle)(jnp.ones(4096))[0][5] == 10.0


def test_an_array_donated_after_the_offload_changes_nothing(any_client: rc.Client) -> None:
    """Once offload has returned, the device buffer may be given away and written over."""
    x = jnp.arange(4096.0) + 0
    vjp: Any = jax.vjp(lambda z: z * z, x)[1]
    handles = [any_client.offload(vjp), any_client.offload(vjp, "test/donated")]
    jax.jit(lambda z: z * 0, donate_argnums=0)(x)
    for handle in handles:
        assert any_client.restore(handle)(jnp.ones(4096))[0][5] == 10.0


def test_a_restored_array_is_not_an_alias_of_what_is_stored(any_client: rc.Client) -> None:
    """Donating a restored leaf gives away memory of its own, so the next restore is right."""
    handle = any_client.offload(jax.vjp(lambda z: z * z, jnp.arange(4096.0))[1])
    for _ in range(3):
        leaf = tree_leaves(any_client.restore(handle))[0]
        assert jax.jit(lambda z: z * 0 - 1, donate_argnums=0)(leaf)[5] == -1.0
    assert any_client.restore(handle)(jnp.ones(4096))[0][5] == 10.0


def test_a_restored_array_outlives_what_is_stored(any_client: rc.Client) -> None:
    """When the bundle is deleted and others take its memory, arrays that were restored from it keep their values."""
    forward = jax.jit(lambda z: jax.vjp(lambda z: z * z, z)[1])
    any_client.offload(forward(jnp.arange(4096.0)), "test/first").wait()
    restored = any_client.restore("test/first")
    any_client.store.delete("test/first")
    for number in range(8):
        any_client.offload(forward(jnp.full(4096, 7.0).at[0].set(number)), f"test/{number}").wait()
    assert restored(jnp.ones(4096))[0][5] == 10.0


def test_only_a_vjp_object_is_taken(client: rc.Client) -> None:
    """What is no VJP object is refused by its type, also its leaves and a VJP with its refs bound already."""
    vjp: Any = jax.vjp(jnp.sin, ramp())[1]
    for wrong in (jnp.sin, ramp(), (vjp,), tree_leaves(vjp), vjp.with_refs(jax.ad.GradValue())):
        with pytest.raises(TypeError, match=f"and this is a {type(wrong).__name__}"):
            client.offload(wrong).wait()


def test_keys_of_an_implementation_that_jax_does_not_know_are_refused(client: rc.Client) -> None:
    """Where they are restored JAX would not find it, so the offload says so and names the leaf."""
    base = jax.extend.random.threefry_prng_impl
    own = jax.extend.random.define_prng_impl(
        key_shape=base.key_shape,
        seed=base.seed,
        split=base.split,
        random_bits=base.random_bits,
        fold_in=base.fold_in,
        name="own",
        tag="own",
    )
    noisy = jax.checkpoint(lambda key, x: jnp.sin(x) * jax.random.normal(key, x.shape))
    _, vjp = jax.vjp(noisy, jax.random.key(0, impl=own), ramp())
    with pytest.raises(LeafUnavailable, match=r"args\[0\] has PRNG keys of the implementation 'own'"):
        client.offload(vjp)


def test_a_ref_argument_works_from_its_handle_and_nowhere_else(client: rc.Client) -> None:
    """The gradient of a Ref goes into a Ref, which no stored program can do; the receipt says so."""

    def read(ref: Any, x: Any) -> Any:
        return jnp.sum(jnp.sin(ref[...]) * x)

    vjp: Any = jax.vjp(read, jax.new_ref(ramp()), ramp())[1]
    handle = client.offload(vjp, "run/ref")
    assert "Ref" in str(handle.wait().no_program)
    direct, restored = jax.new_ref(jnp.zeros(4)), jax.new_ref(jnp.zeros(4))
    vjp.with_refs(direct, jax.ad.DontWant())(1.0)
    client.restore(handle).with_refs(restored, jax.ad.DontWant())(1.0)
    assert bits_of(restored[...]) == bits_of(direct[...])
    with pytest.raises(
        ProgramMismatch, match=r"'run/ref' cannot be restored through another VJP object.*Ref"
    ):
        client.restore("run/ref", like=vjp)
    with pytest.raises(ProgramUnavailable, match="with_refs"):
        client.backward("run/ref")
