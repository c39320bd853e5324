"""Fingerprints: what makes a program another one, and what does not."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import residual_client as rc
from residual_store.errors import ProgramMismatch
from tests.cases.case import ramp
from tests.client.bits import bits_of
from tests.client.identity_child import imported

_REPOSITORY = Path(__file__).parents[2]

_MODEL = '''\
"""A model with a rule of its own."""
import jax
import jax.numpy as jnp


@jax.custom_vjp
def act(x):
    """Sine, with a gradient that is scaled."""
    return jnp.sin(x)


def act_fwd(x):
    return act(x), jnp.cos(x)


def act_bwd(cosine, g):
    return (g * cosine * 1.5,)


act.defvjp(act_fwd, act_bwd)


@jax.jit
def squashed(x):
    return jnp.tanh(x)


def model(params, x):
    for name in ("first", "second"):
        x = act(x @ params[name])
    return jax.lax.fori_loop(0, 2, lambda step, x: squashed(x) * (step + 1), x)


def forward():
    w = (jnp.arange(16.0).reshape(4, 4) - 8) * 0.1
    return jax.vjp(model, {"second": w, "first": w * 2}, jnp.arange(1.0, 5.0))
'''

_COSMETIC = {
    "nothing": ("", ""),
    "a docstring": ("Sine, with a gradient that is scaled.", "The sine function."),
    "no docstring": ('    """Sine, with a gradient that is scaled."""\n', ""),
    "a comment": ("    return (g", "    # The chain rule.\n    return (g"),
    "moved lines": ("@jax.custom_vjp", "\n" * 40 + "@jax.custom_vjp"),
    "other spacing": ("(g * cosine * 1.5,)", "(\n        g\n        * cosine\n        * 1.5,\n    )"),
    "a local name": ("x = act(x @ params[name])", "h = x @ params[name]; x = act(h)"),
    "an argument's name": (
        "def act_bwd(cosine, g):\n    return (g * cosine",
        "def act_bwd(c, ct):\n    return (ct * c",
    ),
    "the name of an inner function": (
        "def squashed(x):\n    return jnp.tanh(x)\n",
        "def flattened(x):\n    return jnp.tanh(x)\n\n\nsquashed = flattened\n",
    ),
    "an unused function": ("def forward", "def unused():\n    return 1\n\n\ndef forward"),
    "a type annotation": (
        "def act_bwd(cosine, g):",
        "def act_bwd(cosine: jax.Array, g: jax.Array) -> tuple[jax.Array]:",
    ),
}
"""Edits that leave the program what it is: a part of the source and what stands there instead."""

_FORWARD_ONLY = {
    "what the forward computes": ("return jnp.sin(x)", "return jnp.sin(x) * 2"),
    "what the rule saves": ("act(x), jnp.cos(x)", "act(x), jnp.sin(x)"),
}
"""Edits of the forward alone: its results are stored already, and the backward is the same."""

_SUBSTANTIAL = {
    "a constant of the rule": ("1.5", "1.6"),
    "the sign of the rule": ("g * cosine * 1.5", "g * cosine * -1.5"),
    "what the rule computes": ("g * cosine * 1.5", "(g + 0.1) * cosine * 1.5"),
    "what an inner function computes": ("jnp.tanh(x)", "jnp.tanh(x) * 3"),
    "the order of the layers": ('("first", "second")', '("second", "first")'),
    "the number of steps": ("fori_loop(0, 2,", "fori_loop(0, 3,"),
}
"""Edits that change the gradient."""


@pytest.fixture(scope="module")
def edited(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[str], dict[str, dict[str, Any]]]:
    """The gradient of the model, and what two processes with other hash seeds make of it through every edit."""
    folder = tmp_path_factory.mktemp("models")
    url = f"file://{tmp_path_factory.mktemp('store')}"
    paths: dict[str, str] = {}
    for name, (old, new) in {**_COSMETIC, **_FORWARD_ONLY, **_SUBSTANTIAL}.items():
        assert old in _MODEL
        paths[name] = str(folder / f"model_{len(paths)}.py")
        Path(paths[name]).write_text(_MODEL.replace(old, new, 1) if old else _MODEL)
    y, vjp = imported(paths["nothing"]).forward()
    with rc.connect(url) as client:
        client.offload(vjp, "identity/model").wait()
    children = {}
    for seed in ("1", "4000"):
        children[seed] = subprocess.Popen(
            [sys.executable, "-W", "error", "-m", "tests.client.identity_child", url, "identity/model"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=_REPOSITORY,
            env={**os.environ, "PYTHONHASHSEED": seed},
        )
    said = {seed: json.loads(child.communicate(json.dumps(paths))[0]) for seed, child in children.items()}
    return bits_of(vjp(jnp.ones_like(y))), said


@pytest.mark.parametrize("edit", _COSMETIC)
def test_a_cosmetic_edit_is_accepted(edited: tuple[list[str], dict[str, dict[str, Any]]], edit: str) -> None:
    """Comments, docstrings, names, places and hash seeds are no part of a program, so the gradient is there at once."""
    gradient, said = edited
    assert [answers[edit] for answers in said.values()] == [gradient] * 2


@pytest.mark.parametrize("edit", _FORWARD_ONLY)
def test_an_edit_of_the_forward_alone_changes_nothing(
    edited: tuple[list[str], dict[str, dict[str, Any]]], edit: str
) -> None:
    """The stored residuals go into the same backward, so the gradient is that of the forward that was stored."""
    gradient, said = edited
    assert [answers[edit] for answers in said.values()] == [gradient] * 2


@pytest.mark.parametrize("edit", _SUBSTANTIAL)
def test_an_edit_of_the_program_is_refused(
    edited: tuple[list[str], dict[str, dict[str, Any]]], edit: str
) -> None:
    """Whatever changes the gradient changes the program; the refusal names the key and the first difference."""
    for answers in edited[1].values():
        assert answers[edit].startswith(
            "ProgramMismatch: 'identity/model' was made by another backward program"
        )
        assert re.search(r"(of the lowered backward|leaves differ:) was .* and is ", answers[edit])
        assert "pass like= from the same function and arguments" in answers[edit]


def scaled(scale: Any) -> Any:
    """A VJP object whose backward multiplies by ``scale``, which its jaxpr's text does not show."""

    @jax.custom_vjp
    def sine(x: Any) -> Any:
        return jnp.sin(x)

    def backward(cosine: Any, g: Any) -> Any:
        return (g * cosine * scale,)

    sine.defvjp(lambda x: (sine(x), jnp.cos(x)), backward)
    return jax.vjp(sine, ramp(4096) if np.size(scale) > 1 else ramp())[1]


def test_rules_that_differ_in_a_constant_are_told_apart(client: rc.Client) -> None:
    """Their jaxprs print alike, because a custom rule is printed by its name; the lowered backwards differ."""
    one, other = scaled(1.0), scaled(5.0)
    assert str(one.jaxpr) == str(other.jaxpr)
    client.offload(one, "run/rule").wait()
    with pytest.raises(
        ProgramMismatch, match=r"line \d+ of the lowered backward was .*1.0.*dense<5.000000e\+00>|dense<5"
    ):
        client.restore("run/rule", like=other)
    accepted = rc.Client(client.store).restore("run/rule", like=scaled(1.0))
    assert bits_of(accepted(jnp.ones(4))) == bits_of(one(jnp.ones(4)))


@pytest.mark.parametrize(
    "names",
    [
        ("main", "inner_0", "inner_2"),
        ("inner_3", "inner_2", "inner_1"),
        ("é", 'a "name" @inner_1', "<lambda>"),
    ],
)
def test_names_of_inner_functions_are_no_part_of_a_program(client: rc.Client, names: tuple[str, ...]) -> None:
    """Whatever they are, also those that this project gives, each function stays the one that it was."""

    def model(names: tuple[str, ...], order: tuple[int, ...]) -> Any:
        layers = []
        for scale, name in enumerate(names, 2):

            def layer(x: Any, scale: int = scale) -> Any:
                return jnp.sin(x) * x * scale

            layer.__name__ = layer.__qualname__ = name
            layers.append(jax.jit(layer))

        def apply(x: Any) -> Any:
            for index in order * 2:
                x = layers[index](x)
            return x

        return jax.jit(lambda x: jax.vjp(apply, x)[1])(ramp() / 8)

    ones, forth, back = jnp.ones(4), (0, 1, 2), (2, 1, 0)
    client.offload(model(("a", "b", "c"), forth), "run/named").wait()
    vjp = model(names, forth)
    client.offload(vjp, "run/otherwise").wait()
    wanted = bits_of(jax.jit(lambda vjp, ct: vjp(ct))(vjp, ones))
    assert bits_of(client.backward("run/otherwise")(ones)) == wanted
    assert bits_of(client.restore("run/named", like=vjp)(ones)) == bits_of(vjp(ones))
    for key in ("run/named", "run/otherwise"):
        with pytest.raises(ProgramMismatch):
            client.restore(key, like=model(names, back))


def test_the_target_of_a_custom_call_is_no_name_of_a_function(client: rc.Client) -> None:
    """It tells two programs apart, also where the function around the call is called like it."""

    def calling(target: str) -> Any:
        def call(x: Any, g: Any) -> Any:
            return jax.ffi.ffi_call(target, jax.ShapeDtypeStruct(x.shape, x.dtype))(x, g)

        call.__name__ = call.__qualname__ = target
        rule = jax.custom_vjp(lambda x: x * 2)
        rule.defvjp(lambda x: (x * 2, x), lambda x, g: (jax.jit(call)(x, g),))
        return jax.jit(lambda x: jax.vjp(rule, x)[1])(ramp())

    client.offload(calling("add_bwd"), "run/call").wait()
    with pytest.raises(ProgramMismatch):
        client.restore("run/call", like=calling("mul_bwd"))


def test_a_program_is_that_of_the_settings_at_its_offload(client: rc.Client) -> None:
    """A rule is traced when it is applied, so one VJP object has another program where 64-bit types are on."""

    @jax.custom_vjp
    def act(x: Any) -> Any:
        return x * 2

    def act_bwd(x: Any, g: Any) -> Any:
        wide = g.astype(float) + 1e8
        return ((wide - 1e8).astype(g.dtype) * x,)

    act.defvjp(lambda x: (act(x), x), act_bwd)
    y, vjp = jax.jit(lambda x: jax.vjp(act, x))(ramp())
    for x64 in (False, True):
        with jax.enable_x64(x64):
            apply = jax.jit(lambda vjp, ct: vjp(ct))
            wanted = bits_of(apply(vjp, jnp.ones_like(y)))
            handle = client.offload(vjp, f"run/x64-{x64}")
            assert bits_of(client.backward(handle.key)(jnp.ones_like(y))) == wanted
            assert bits_of(apply(client.restore(handle.key, like=vjp), jnp.ones_like(y))) == wanted
    narrow, wide = (client.store.get(f"run/x64-{x64}").manifest.fingerprint for x64 in (False, True))
    assert narrow != wide
    with jax.enable_x64(True), pytest.raises(ProgramMismatch):
        client.restore("run/x64-False", like=vjp)


def test_one_element_of_a_large_constant_makes_another_program(client: rc.Client) -> None:
    """Constants count in full, however large, and not as the few elements that a printer shows."""
    table = np.arange(4096, dtype=np.float32)
    other = table.copy()
    other[2048] += 1
    client.offload(scaled(table), "run/table").wait()
    with pytest.raises(ProgramMismatch, match="'run/table'"):
        client.restore("run/table", like=scaled(other))
    accepted = rc.Client(client.store).restore("run/table", like=scaled(table.copy()))
    assert bits_of(accepted(jnp.ones(4096))) == bits_of(scaled(table)(jnp.ones(4096)))


@pytest.mark.parametrize("key", ["\udc80", b"a", -1, 2**70, ("a", 1), 1.5, True], ids=ascii)
def test_dictionaries_with_any_key_are_told_apart(client: rc.Client, key: Any) -> None:
    """The first difference is named whatever the keys are: that of the program, of a leaf, or of the tree itself."""

    def made(function: Any, *keys: Any) -> Any:
        return jax.vjp(lambda p: sum(map(function, p.values())), dict.fromkeys(keys, ramp()))[1]

    def squared(x: Any) -> Any:
        return jnp.sum(x * x)

    client.offload(made(squared, key), "run/keys").wait()
    for other in (made(lambda x: jnp.sum(x * x * x), key), made(jnp.sum, key), jax.vjp(squared, ramp())[1]):
        with pytest.raises(ProgramMismatch, match="'run/keys'"):
            client.restore("run/keys", like=other)
    accepted = rc.Client(client.store).restore("run/keys", like=made(squared, key))
    assert bits_of(accepted(1.0)) == bits_of(made(squared, key)(1.0))


class _Name:
    """A key of a dictionary, equal by its text, whose repr says where it lies."""

    def __init__(self, text: str) -> None:
        self.text = text

    def __hash__(self) -> int:
        return hash(self.text)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Name) and self.text == other.text

    def __lt__(self, other: _Name) -> bool:
        return self.text < other.text


def test_keys_that_are_made_anew_are_the_same_keys(client: rc.Client) -> None:
    """The path of an argument says nothing of where a key lies in memory."""

    def made() -> Any:
        arrays = {_Name("w"): ramp(), _Name("b"): 2 * ramp()}
        return jax.jit(lambda p: jax.vjp(lambda p: p[_Name("w")] * jnp.sin(p[_Name("b")]), p))(arrays)[1]

    client.offload(made(), "run/a").wait()
    restored = client.restore("run/a", like=made())
    assert bits_of(jax.tree.leaves(restored(ramp()))) == bits_of(jax.tree.leaves(made()(ramp())))
    assert "0x" not in str([argument.path for argument in client.store.manifest("run/a").arguments])
