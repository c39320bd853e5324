"""Arguments, cotangents and precision: what does not fit the forward call is refused by name before it is used."""

from __future__ import annotations

import enum
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import residual_client as rc
from residual_store.errors import ArgumentMismatch, CotangentMismatch, PrecisionMismatch, ProgramMismatch
from tests.cases.arguments import layer
from tests.cases.case import matrix, ramp
from tests.cases.trees import Linear, Pair
from tests.client.bits import bits_of

type Restoring = Callable[[Any], Any]
"""Restores the one bundle of the test with these ``args``, and applies it to ones."""


@pytest.fixture(params=["restore", "backward"])
def way(request: pytest.FixtureRequest) -> str:
    """The two ways to a gradient, which take the same ``args`` and refuse the same ones."""
    way: str = request.param
    return way


def restoring(client: rc.Client, way: str, fn: Any, *args: Any, checked: Any = None) -> Restoring:
    """Store a VJP object whose weights, the first argument, are not saved, and say how to restore it."""
    y, vjp = jax.vjp(fn, *args, saveable_args=(False,) + (True,) * (len(args) - 1))
    client.offload(vjp, "run/step", args=checked).wait()
    y_bar = jnp.ones_like(y)
    if way == "backward":
        return lambda given: client.backward("run/step")(y_bar, args=given)
    return lambda given: client.restore("run/step", args=given)(y_bar)


def dict_layer(params: Any, x: Any) -> Any:
    return jnp.tanh(x @ params["w"]) * params["b"]


def refusal(call: Callable[[], Any]) -> ArgumentMismatch:
    """The refusal of a call."""
    with pytest.raises(ArgumentMismatch) as caught:
        call()
    return caught.value


W, X, PARAMS = matrix(), ramp(), {"w": matrix(), "b": ramp() + 1}


def test_the_right_arguments_give_the_right_gradient(client: rc.Client, way: str) -> None:
    """What was not saved is taken from args, and an entry that needs nothing may be None."""
    run = restoring(client, way, dict_layer, PARAMS, X)
    wanted = bits_of(jax.jit(lambda vjp, ct: vjp(ct))(jax.vjp(dict_layer, PARAMS, X)[1], jnp.ones(4)))
    if way == "restore":
        wanted = bits_of(jax.vjp(dict_layer, PARAMS, X)[1](jnp.ones(4)))
    assert bits_of(run((PARAMS, None))) == wanted
    assert bits_of(run((PARAMS, X))) == wanted
    assert bits_of(run([PARAMS, None])) == wanted
    assert bits_of(run(({name: np.asarray(value) for name, value in PARAMS.items()}, None))) == wanted


def test_what_was_saved_is_never_overwritten(client: rc.Client, way: str) -> None:
    """args fills only what is missing: a saved argument stays that of the forward call."""
    run = restoring(client, way, layer, W, X)
    assert bits_of(run((W, X * 100))) == bits_of(run((W, None)))


def test_a_missing_argument_is_named(client: rc.Client, way: str) -> None:
    """An argument that is needed and was not given is named by its path, with what to do."""
    run = restoring(client, way, dict_layer, PARAMS, X)
    error = refusal(lambda: run((None, X)))
    assert error.fields["leaf"] in ("args[0]['w']", "args[0]['b']")
    assert "was marked not saveable, so its value is not in the bundle; pass it in args" in str(error)


def test_the_number_of_arguments_is_checked(client: rc.Client, way: str) -> None:
    """One argument too few or too many would shift the others."""
    run = restoring(client, way, layer, W, X)
    for args in ((W,), (W, X, X), ()):
        assert "the function was called with 2 arguments" in str(refusal(lambda args=args: run(args)))  # type: ignore[misc]
    assert "args is a dict; pass a tuple" in str(refusal(lambda: run({"w": W})))


def test_a_wrong_shape_is_named(client: rc.Client, way: str) -> None:
    """A shape that merely broadcasts is refused: JAX itself would compute on with it."""
    run = restoring(client, way, dict_layer, PARAMS, X)
    error = refusal(lambda: run(({**PARAMS, "b": jnp.ones(1)}, None)))
    assert "args[0]['b'] was float32[4] at the forward call and is float32[1]" in str(error)
    assert "pass the value of the forward call" in str(error)
    assert error.fields["leaf"] == "args[0]['b']"


def test_a_wrong_dtype_is_named(client: rc.Client, way: str) -> None:
    """A weight that was cast since then is refused."""
    run = restoring(client, way, dict_layer, PARAMS, X)
    error = refusal(lambda: run(({**PARAMS, "w": W.astype(jnp.bfloat16)}, None)))
    assert "args[0]['w'] was float32[4,4] at the forward call and is bfloat16[4,4]" in str(error)


def test_stale_weights_are_named_if_the_offload_was_shown_them(client: rc.Client, way: str) -> None:
    """With offload(args=...) the restore compares contents, so weights of after the update are refused."""
    run = restoring(client, way, dict_layer, PARAMS, X, checked=(PARAMS, None))
    error = refusal(lambda: run(({**PARAMS, "w": W - 0.01}, None)))
    assert "args[0]['w'] has other values than at the forward call" in str(error)
    assert "the weights before the update" in str(error)
    assert bits_of(run((PARAMS, None))) == bits_of(run((jax.tree.map(np.asarray, PARAMS), None)))


def test_what_is_no_array_is_named(client: rc.Client, way: str) -> None:
    """Text is not a weight."""
    run = restoring(client, way, dict_layer, PARAMS, X)
    assert "args[0]['w'] is a str" in str(refusal(lambda: run(({**PARAMS, "w": "weights.npz"}, None))))


def test_other_containers_are_refused(client: rc.Client, way: str) -> None:
    """Values are matched by position, so the containers must be those of the call; the first other one is named."""
    params = OrderedDict([("z", ramp()), ("a", 5 * ramp())])
    run = restoring(client, way, lambda p: jnp.sum(p["z"] * p["a"]), params)
    error = refusal(lambda: run((dict(params),)))
    assert (
        "args[0] was an OrderedDict with the keys ['z', 'a'] and is a dict with the keys ['a', 'z']"
        in str(error)
    )
    assert "the container types must be the same" in str(error)
    swapped = OrderedDict(reversed(params.items()))
    assert "and is an OrderedDict with the keys ['a', 'z']" in str(refusal(lambda: run((swapped,))))
    assert bits_of(run((params,))[0]["z"]) == bits_of(params["a"])


def test_other_keys_and_lengths_are_refused(client: rc.Client, way: str) -> None:
    """A missing key, another key, one entry too many, or a leaf where a tree was: named by the place."""
    run = restoring(
        client,
        way,
        lambda p: jnp.sum(p["d"]["w"] * p["l"][1]) + p["l"][0].sum(),
        {"d": {"w": X}, "l": [X, X]},
    )
    for other, place in (
        ({"d": {"v": X}, "l": [X, X]}, "args[0]['d'] was a dict with the keys ['w']"),
        ({"d": {"w": X}, "l": [X, X, X]}, "args[0]['l'] was a list of 2 and is a list of 3"),
        ({"d": {"w": X}, "l": (X, X)}, "args[0]['l'] was a list of 2 and is a tuple of 2"),
        ({"d": X, "l": [X, X]}, "args[0]['d'] was a dict with the keys ['w'] and is a leaf"),
        ({"d": {"w": None}, "l": [X, X]}, "args[0]['d']['w'] was a leaf and is None"),
    ):
        assert place in str(refusal(lambda other=other: run((other,))))  # type: ignore[misc]


def test_a_namedtuple_may_be_given_as_itself_or_as_a_tuple(client: rc.Client, way: str) -> None:
    """In a VJP object a NamedTuple is a plain tuple, so both are taken, and nothing else is."""
    run = restoring(client, way, lambda p: jnp.sum(p.w * jnp.sin(p.b) * p.b), Pair(X, X * 2))
    assert bits_of(list(run((Pair(X, X * 2),))[0])) == bits_of(list(run(((X, X * 2),))[0]))
    assert "args[0] was a Pair" in str(refusal(lambda: run(([X, X * 2],))))


def test_a_static_field_is_a_part_of_the_tree(client: rc.Client, way: str) -> None:
    """A module with another activation has the same arrays and is another module."""
    run = restoring(client, way, lambda module, x: module(x), Linear(W, X, "sin"), X)
    text = str(refusal(lambda: run((Linear(W, X, "tanh"), None))))
    assert "args[0] was a Linear with ('sin',) and is a Linear with ('tanh',)" in text
    assert isinstance(run((Linear(W, X, "sin"), None))[0], Linear)


def test_a_class_that_was_defined_anew_is_another_one(client: rc.Client, way: str) -> None:
    """As by a notebook cell that is run again: under the same name its leaves may come in another order."""

    def cell(*order: str) -> Any:
        class Params:
            def __init__(self, **fields: Any) -> None:
                self.__dict__ |= fields

        jax.tree_util.register_pytree_node(
            Params,
            lambda one: ([getattr(one, name) for name in order], None),
            lambda _, leaves: Params(**dict(zip(order, leaves, strict=True))),
        )
        return Params(w=ramp(), b=2 * ramp())

    run = restoring(client, way, lambda p, x: p.w * jnp.sin(p.b) * x, first := cell("w", "b"), ramp())
    assert run((first, None))
    with pytest.raises(ArgumentMismatch, match="another class of this name: one is defined anew"):
        run((cell("b", "w"), None))


def test_keys_are_not_their_data(client: rc.Client, way: str) -> None:
    """A typed key cannot be replaced by its words, by a key of another implementation or by several keys."""
    noisy = jax.checkpoint(lambda key, x: jnp.sum(jnp.sin(x) * jax.random.normal(key, x.shape)))
    key = jax.random.key(0)
    run = restoring(client, way, noisy, key, X)
    for other in (jax.random.key_data(key), jax.random.key(0, impl="rbg"), jax.random.split(key)):
        text = str(refusal(lambda other=other: run((other, None))))  # type: ignore[misc]
        assert "args[0] was key<threefry2x32>[] at the forward call and is" in text
    assert bits_of(run((key, None))[1]) == bits_of(run((jax.random.key(0), X))[1])


def test_enum_keys_come_back(client: rc.Client) -> None:
    """Keys that only their own class can express come back where the argument itself is given."""
    part = enum.StrEnum("part", ["KERNEL", "BIAS"])
    params = {part["KERNEL"]: X, part["BIAS"]: X * 3}
    run = restoring(client, "backward", lambda p: jnp.sum(p[part["KERNEL"]] * p[part["BIAS"]]), params)
    gradient = run((params,))[0]
    assert set(map(type, gradient)) == {part}
    assert bits_of(gradient[part["KERNEL"]]) == bits_of(X * 3)


def test_refusals_of_arguments_name_the_key(client: rc.Client, way: str) -> None:
    """Of many bundles, the message says which one is meant."""
    run = restoring(client, way, layer, W, X, checked=(W, None))
    for args in ((W,), (W[:1], None), (W * 2, None), (None, X), ({"w": W}, None)):
        assert "'run/step'" in str(refusal(lambda args=args: run(args)))  # type: ignore[misc]


def test_a_forgotten_restore_is_named_by_jax(client: rc.Client) -> None:
    """Without args the missing ones stay NotSaveable, so JAX's own error names them, and they can be put in by hand."""
    y, vjp = jax.vjp(layer, W, X, saveable_args=(False, True))
    restored = client.restore(client.offload(vjp))
    with pytest.raises(
        ValueError, match=r"the argument at position args\[0\] of the differentiated function layer"
    ):
        restored(jnp.ones_like(y))
    restored.args_res[0] = W
    assert bits_of(restored(y)) == bits_of(jax.vjp(layer, W, X)[1](y))


# Cotangents of the source-free backward


@pytest.mark.parametrize(
    ("cotangent", "words"),
    [
        ({"a": jnp.ones(3), "b": jnp.ones(())}, r"cotangent\['a'\] is float32\[3\], and .* was float32\[4\]"),
        ({"a": jnp.ones(4), "b": jnp.ones(1)}, r"cotangent\['b'\] is float32\[1\], and .* was float32\[\]"),
        ({"a": jnp.ones(4, jnp.bfloat16), "b": jnp.ones(())}, r"cotangent\['a'\] is bfloat16\[4\]"),
        ({"a": jnp.ones(4, jnp.int32), "b": jnp.ones(())}, r"cotangent\['a'\] is int32\[4\]"),
        ({"a": jnp.ones(4)}, r"cotangent was a dict with the keys \['a', 'b'\]"),
        ((jnp.ones(4), jnp.ones(())), r"cotangent was a dict .* and is a tuple of 2"),
        ({"a": "ones", "b": jnp.ones(())}, r"cotangent\['a'\] is a str"),
    ],
)
def test_a_cotangent_that_is_not_of_the_output_is_named(
    client: rc.Client, cotangent: Any, words: str
) -> None:
    """The stored backward takes a cotangent of the output's tree, shapes and dtypes, and names the first other leaf."""
    client.offload(jax.vjp(lambda x: {"a": jnp.sin(x), "b": jnp.sum(x * x)}, X)[1], "run/step").wait()
    backward = client.backward("run/step")
    with pytest.raises(CotangentMismatch, match=words):
        backward(cotangent)
    assert len(backward({"a": np.ones(4, np.float32), "b": 1.0})) == 1


# Precision


def _sine(x: Any) -> Any:
    return jnp.sin(x) * x


def test_a_wide_bundle_is_refused_where_x64_is_off(client: rc.Client) -> None:
    """float64 is never cut to float32 without a word: every way to it names the leaf and the setting."""
    with jax.enable_x64(True):
        vjp = jax.vjp(_sine, np.arange(1.0, 4.0))[1]
        handle, scratch = client.offload(vjp, "run/wide"), client.offload(vjp)
    calls: list[Callable[[], Any]] = [
        lambda: client.restore(handle),
        lambda: client.restore(scratch),
        lambda: client.restore("run/wide"),
        lambda: client.backward("run/wide"),
    ]
    for call in calls:
        with pytest.raises(PrecisionMismatch, match=r"args\[0\] is float64.*set jax_enable_x64"):
            call()
    with pytest.raises(ProgramMismatch, match=r"float64\[3\].*float32\[3\]"):
        client.restore("run/wide", like=jax.vjp(_sine, np.arange(1.0, 4.0))[1])
    with jax.enable_x64(True):
        assert bits_of(client.restore(handle)(np.ones(3))) == bits_of(vjp(np.ones(3)))


def test_wide_integers_are_refused_where_x64_is_off(client: rc.Client) -> None:
    """The same holds for an int64 index, which is no gradient and decides one."""
    gather = jax.checkpoint(lambda x, i: x[i] * x[i])
    with jax.enable_x64(True):
        handle = client.offload(jax.vjp(gather, np.arange(3, dtype=np.float32), np.array([2, 0]))[1])
    with pytest.raises(PrecisionMismatch, match=r"args\[1\] is int64"):
        client.restore(handle)


def test_a_rule_that_computes_in_float64_is_not_cut(client: rc.Client) -> None:
    """A custom rule is traced when it is applied, so where x64 is off it would compute in float32 without a word."""
    large = np.full(4, 1e8)

    @jax.custom_vjp
    def identity(x: Any) -> Any:
        return x

    identity.defvjp(lambda x: (x, None), lambda _, g: (((g + large) - large).astype(jnp.float32),))
    with jax.enable_x64(True):
        vjp = jax.vjp(identity, np.arange(1, 5, dtype=np.float32))[1]
        sources: list[rc.Handle | str] = [client.offload(vjp), client.offload(vjp, "run/rule"), "run/rule"]
        wanted = bits_of(vjp(np.ones(4, np.float32)))
    assert bits_of(client.backward("run/rule")(np.ones(4, np.float32))) == wanted
    for source in sources:
        with pytest.raises(PrecisionMismatch):
            client.restore(source)


def test_a_narrow_bundle_is_the_same_where_x64_is_on(client: rc.Client) -> None:
    """float32 stays float32 in a process that has 64-bit types."""
    vjp = jax.vjp(_sine, X)[1]
    handle = client.offload(vjp, "run/narrow")
    wanted = bits_of(vjp(jnp.ones(4)))
    jitted = bits_of(jax.jit(lambda vjp, ct: vjp(ct))(vjp, jnp.ones(4)))
    ones = np.ones(4, np.float32)
    with jax.enable_x64(True):
        assert bits_of(client.restore(handle)(ones)) == wanted
        assert bits_of(client.restore("run/narrow")(ones)) == wanted
        assert bits_of(client.backward("run/narrow")(ones)) == jitted
