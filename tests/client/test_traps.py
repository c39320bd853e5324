"""What goes wrong without an error elsewhere: here it is refused by name, or the number is right."""

from __future__ import annotations

import asyncio
import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.tree_util import tree_leaves, tree_structure

import residual_client as rc
from residual_client.program_cache import EagerForwardWarning
from residual_store.errors import (
    AlreadyExists,
    ArgumentMismatch,
    BundleReplaced,
    GradientRefused,
    InvalidOption,
    NotFound,
    ProgramMismatch,
    ProgramUnavailable,
)
from tests.cases.arguments import layer
from tests.cases.case import matrix, ramp
from tests.cases.structured import sine_times
from tests.client.bits import bits_of

# Values inside of the treedef


def test_a_dummy_forward_with_other_literals_is_refused(client: rc.Client) -> None:
    """Python scalars are literals of the program, so a forward with other scalars is another program."""
    client.offload(jax.vjp(lambda a, b: a * b, 2.0, 3.0)[1], "run/scalars").wait()
    dummy = jax.vjp(lambda a, b: a * b, 0.0, 0.0)[1]
    with pytest.raises(ProgramMismatch) as refusal:
        client.restore("run/scalars", like=dummy)
    text = str(refusal.value)
    assert "'run/scalars'" in text
    assert "dense<3.000000e+00>" in text
    assert "dense<0.000000e+00>" in text
    assert "pass like= from the same function and arguments" in text
    assert [float(g) for g in client.restore("run/scalars")(1.0)] == [3.0, 2.0]


def test_a_branch_taken_on_a_value_is_another_program(client: rc.Client) -> None:
    """Both branches have one signature, f32[] in and f32[] out, and yet only the one that ran is accepted."""

    def branching(a: Any) -> Any:
        return jnp.sin(a) if a > 0 else jnp.sqrt(1 - a)

    client.offload(jax.vjp(branching, jnp.float32(1.0))[1], "run/branch").wait()
    with pytest.raises(ProgramMismatch, match="line 4 of the lowered backward was"):
        client.restore("run/branch", like=jax.vjp(branching, jnp.float32(-1.0))[1])


def test_scalars_of_a_jitted_forward_are_leaves(client: rc.Client) -> None:
    """Under jit a scalar is a residual like any other, so dummy scalars describe the program well enough."""
    forward = jax.jit(lambda a, b: jax.vjp(lambda a, b: a * b, a, b))
    client.offload(forward(2.0, 3.0)[1], "run/scalars").wait()
    restored = rc.Client(client.store).restore("run/scalars", like=jax.eval_shape(forward, 0.0, 0.0)[1])
    assert [float(g) for g in restored(1.0)] == [3.0, 2.0]


def test_a_bundle_needs_a_traced_program(client: rc.Client) -> None:
    """A client that has not traced the program says what to pass, and that there is a way without the source."""
    client.offload(jax.vjp(layer, matrix(), ramp())[1], "run/layer").wait()
    with pytest.raises(ProgramUnavailable) as refusal:
        rc.Client(client.store).restore("run/layer")
    assert "'run/layer'" in str(refusal.value)
    assert "like=jax.eval_shape(forward, *args)[1]" in str(refusal.value)
    assert "client.backward" in str(refusal.value)
    assert refusal.value.fields["key"] == "run/layer"


# The states of arguments


def test_a_vjp_that_only_its_mapping_understands_is_stored_without_a_program(client: rc.Client) -> None:
    """No leaf shows that it was mapped, and it cannot be traced outside: the receipt and every refusal say so."""
    y, vjp = jax.vmap(lambda x: jax.vjp(lambda x: x - jax.lax.psum(x, "i"), x), axis_name="i")(matrix())
    handle = client.offload(vjp, "run/mapped")
    assert "the backward cannot be traced on its own: NameError" in str(handle.wait().no_program)
    apply = jax.vmap(lambda vjp, ct: vjp(ct), axis_name="i")
    assert bits_of(apply(client.restore(handle), y)) == bits_of(apply(vjp, y))
    with pytest.raises(ProgramUnavailable, match=r"only from its handle.*cannot be traced on its own"):
        client.restore("run/mapped")
    with pytest.raises(ProgramUnavailable, match="has no source-free backward"):
        client.backward("run/mapped")


def test_nobody_is_sent_to_a_program_that_is_not_there(client: rc.Client) -> None:
    """A bundle that no program could be made of says only what helps: the VJP object of the same function."""

    def called(scale: int) -> Any:
        act = jax.custom_vjp(lambda x: x * 2)
        act.defvjp(lambda x: (act(x), None), lambda _, g: (_on_host(g) * scale,))
        return jax.vjp(act, ramp())[1]

    assert client.offload(called(2), "run/host").wait().no_program is not None
    with pytest.raises(ProgramMismatch, match="pass like=") as mismatch:
        client.restore("run/host", like=called(3))
    with pytest.raises(ProgramUnavailable, match="pass like=") as unavailable:
        rc.Client(client.store).restore("run/host")
    for caught in (mismatch, unavailable):
        assert "client.backward" not in str(caught.value)


def _on_host(g: Any) -> Any:
    return jax.pure_callback(np.negative, jax.ShapeDtypeStruct(g.shape, g.dtype), g)


def test_what_is_not_needed_is_not_none(client: rc.Client) -> None:
    """The three states of an argument are kept by position, and each comes back as what it was."""

    def mixed(a: Any, b: Any, c: Any) -> Any:
        return a + jnp.sin(b) + b * b + 2 * c

    args = (ramp(), ramp() + 1, ramp() + 5)
    vjp: Any = jax.vjp(mixed, *args, saveable_args=False)[1]
    handle = client.offload(vjp, "run/states")
    client.flush()
    states = [(one.path, one.state) for one in client.store.manifest("run/states").arguments]
    assert states == [("args[0]", "not_needed"), ("args[1]", "not_saveable"), ("args[2]", "not_needed")]
    restored = client.restore(handle)
    assert [type(one).__name__ for one in restored.args_res] == ["NotNeeded", "NotSaveable", "NotNeeded"]
    wanted = jax.vjp(mixed, *args)[1](jnp.ones(4))
    assert bits_of(client.restore(handle, args=(None, args[1], None))(jnp.ones(4))) == bits_of(wanted)


def test_none_in_the_place_of_a_sentinel_is_refused_at_the_offload(client: rc.Client) -> None:
    """None is an empty node, so it would shift every later argument; the offload names the first one."""
    vjp: Any = jax.vjp(lambda a, b: a + b * b, ramp(), ramp(), saveable_args=False)[1]
    vjp.args_res = [None, ramp()]
    with pytest.raises(ArgumentMismatch, match=r"args\[0\] was a leaf and is None; assign values"):
        client.offload(vjp).wait()


def test_a_leaf_of_another_dtype_put_in_by_hand_is_refused(client: rc.Client) -> None:
    """JAX computes on with whatever stands in args_res, so a leaf that its program does not expect is named."""
    forward = jax.jit(lambda w, x: jax.vjp(layer, w, x)[1])
    client.offload(forward(matrix(), ramp()), "run/good").wait()
    edited: Any = forward(matrix(), ramp())
    edited.args_res[0] = matrix().astype(jnp.bfloat16)
    with pytest.raises(GradientRefused, match=r"args\[0\]"):
        client.offload(edited, "run/edited").wait()


def test_a_plain_dict_put_in_by_hand_for_an_ordereddict_is_refused(client: rc.Client) -> None:
    """The two flatten in different orders, so two gradients would change places."""
    params = OrderedDict([("z", ramp()), ("a", 5 * ramp())])
    vjp: Any = jax.vjp(lambda p: jnp.sum(p["z"] * p["a"]), params, saveable_args=False)[1]
    vjp.args_res = [dict(params)]
    with pytest.raises(ArgumentMismatch, match=r"args\[0\] was an OrderedDict with the keys \['z', 'a'\]"):
        client.offload(vjp, "run/ordered").wait()


# What saveable_args does not cover, and what is sent once


def test_a_copy_of_a_leaf_is_sent_once(client: rc.Client) -> None:
    """A closed-over copy of an argument has its bytes, and costs nothing; the receipt says how much that was."""
    w = jnp.asarray(np.arange(64 * 64, dtype=np.float32).reshape(64, 64))
    copy = w + 0
    vjp: Any = jax.vjp(lambda w, x: jnp.sin(x @ w) @ copy, w, ramp(64))[1]
    receipt = client.offload(vjp).wait()
    assert receipt.saved_bytes["alias"] == w.nbytes
    assert receipt.array_nbytes - receipt.nbytes >= w.nbytes - 64 * receipt.leaves


def test_a_structured_residual_that_is_one_array_twice_is_one_again(any_client: rc.Client) -> None:
    """An alias costs no bytes, and does not double the memory of the process that restores it."""
    vjp: Any = jax.vjp(lambda a, b: jnp.sum(sine_times(a, b)), ramp(), ramp() * 2)[1]
    arrays = len({id(leaf) for leaf in tree_leaves(vjp)})
    handle = any_client.offload(vjp, "test/structured")
    for source in (handle, handle.key):
        leaves = tree_leaves(any_client.restore(source))
        assert (len(leaves), len({id(leaf) for leaf in leaves})) == (4, arrays)
        assert arrays == 3


# Weak types and compilation


@pytest.mark.parametrize("named", [False, True])
def test_twenty_steps_trace_the_backward_once(client: rc.Client, named: bool) -> None:
    """Weak types and the treedef come back as they were, so a jitted backward is traced for the first step only."""
    traced = []
    forward = jax.jit(lambda a, w, x: jax.vjp(lambda a, w, x: jnp.tanh(x @ w) * a, a, w, x))

    @jax.jit
    def backward(vjp: Any, y_bar: Any) -> Any:
        traced.append(tree_structure(vjp))
        return vjp(y_bar)

    for step in range(20):
        y, vjp = forward(jnp.asarray(2.0), matrix(scale=0.1 + step), ramp())
        handle = client.offload(vjp, f"run/step-{step}" if named else None)
        restored = client.restore(handle if step % 2 else handle.key) if named else client.restore(handle)
        assert [leaf.weak_type for leaf in tree_leaves(restored)] == [
            leaf.weak_type for leaf in tree_leaves(vjp)
        ]
        backward(restored, jnp.ones_like(y))
    assert len(traced) == 1


def test_an_eager_forward_is_warned_of_once(client: rc.Client) -> None:
    """An eager forward makes a new treedef at every call, which costs a lowering; the warning says what to do."""
    client.offload(jax.vjp(layer, matrix(), ramp())[1], "run/step-0").wait()
    with pytest.warns(
        EagerForwardWarning, match=r"jit the forward: jax\.jit\(lambda \*args: jax\.vjp\(f, \*args\)\)"
    ):
        client.offload(jax.vjp(layer, matrix(), ramp())[1], "run/step-1").wait()
    client.offload(jax.vjp(layer, matrix(), ramp())[1], "run/step-2").wait()
    assert len({stat.fingerprint for stat in client.store.list().entries}) == 1


# Keys and handles


def test_a_key_that_is_not_there_is_named(client: rc.Client) -> None:
    """A missing bundle is named by its key."""
    for look in (client.restore, client.backward):
        with pytest.raises(NotFound, match="'run/nothing'"):
            look("run/nothing")


def test_a_handle_never_restores_what_took_its_place(client: rc.Client) -> None:
    """The bundle that a handle stands for is the one with its bytes, not the one with its key."""
    forward = jax.jit(lambda w, x: jax.vjp(layer, w, x)[1])
    handle = client.offload(forward(matrix(), ramp()), "run/replaced")
    with pytest.raises(AlreadyExists, match=r"'run/replaced'.*if_exists=replace"):
        client.offload(forward(matrix(), ramp() * 2), "run/replaced").wait()
    client.offload(forward(matrix(), ramp() * 2), "run/replaced", if_exists="replace").wait()
    with pytest.raises(BundleReplaced, match=r"'run/replaced' was replaced.*use the key"):
        client.restore(handle)


def test_a_scratch_bundle_belongs_to_its_handle(client: rc.Client) -> None:
    """It cannot travel, and says how to name a bundle that can."""
    vjp: Any = jax.vjp(layer, matrix(), ramp())[1]
    handle = client.offload(vjp)
    handle.wait()
    with pytest.raises(InvalidOption, match="pass a key to offload"):
        handle.to_json()
    with pytest.raises(ProgramMismatch, match="scratch bundle; restore it from the handle"):
        rc.Client(client.store).restore(handle.key, like=vjp)
    with pytest.raises(ProgramUnavailable, match="scratch"):
        client.backward(handle)


# Callers of every kind


def test_from_a_running_event_loop_and_from_another_thread(any_client: rc.Client) -> None:
    """Blocking calls work inside of a running loop, and a client made in one thread works in another."""
    vjp: Any = jax.vjp(lambda x: x * x, ramp())[1]
    found: list[Any] = []

    def round_trip() -> None:
        found.append(any_client.restore(any_client.offload(vjp))(jnp.ones(4)))

    async def inside_a_loop() -> None:
        round_trip()

    asyncio.run(inside_a_loop())
    thread = threading.Thread(target=round_trip)
    thread.start()
    thread.join()
    assert [bits_of(one) for one in found] == [bits_of(vjp(jnp.ones(4)))] * 2


def test_a_failing_call_leaves_the_client_usable(client: rc.Client) -> None:
    """After a refusal the next call works as if nothing had happened."""
    vjp: Any = jax.vjp(layer, matrix(), ramp(), saveable_args=(False, True))[1]
    handle = client.offload(vjp, "run/again")
    refused: list[Callable[[], Any]] = [
        lambda: client.restore(handle, args=(ramp(), None)),
        lambda: client.restore("run/nothing"),
        lambda: client.offload(ramp()),
    ]
    for call in refused:
        with pytest.raises((ArgumentMismatch, NotFound, TypeError)):
            call()
    wanted = jax.vjp(layer, matrix(), ramp())[1](jnp.ones(4))
    assert bits_of(client.restore(handle, args=(matrix(), None))(jnp.ones(4))) == bits_of(wanted)
