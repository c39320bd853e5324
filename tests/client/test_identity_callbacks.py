"""Host callbacks: StableHLO says that Python is called, and not what it does, so their code is a part of the identity."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import residual_client as rc
from residual_store.errors import ProgramMismatch, ProgramUnavailable
from tests.cases.case import ramp
from tests.client.bits import bits_of


@pytest.fixture
def client() -> Iterator[rc.Client]:
    """A client of an empty store in this process."""
    with rc.connect("memory://") as client:
        yield client


def calling(source: str, name: str = "callback.py") -> Any:
    """A VJP object whose backward calls the function ``callback`` in this source on the host."""
    namespace: dict[str, Any] = {"np": np, "__name__": "callbacks"}
    exec(compile(source, name, "exec"), namespace)

    @jax.custom_vjp
    def sine(x: Any) -> Any:
        return jnp.sin(x)

    def backward(x: Any, g: Any) -> Any:
        shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
        return (g * jax.pure_callback(namespace["callback"], shape, x),)

    sine.defvjp(lambda x: (sine(x), x), backward)
    return jax.vjp(sine, ramp())[1]


_CLASS = """
class Ops:
    @staticmethod
    def scale(v):
        return v * np.float32(2)

def callback(v):
    return Ops.scale(v)
"""
_METHOD = """
class Ops:
    def scale(self, v):
        return v * np.float32(2)

def callback(v):
    return Ops().scale(v)
"""
_MODULE = """
import types
ops = types.ModuleType("ops")
exec("import numpy as np\\ndef scale(v): return v * np.float32(2)", vars(ops))

def callback(v):
    return ops.scale(v)
"""
_TRY = """
def callback(v):
    try:
        return v * np.float32(2)
    except ValueError:
        return v
"""

_EDITS = {
    "a function of numpy": ("def callback(v): return np.cos(v)", "cos", "sin"),
    "a constant": ("def callback(v): return v * np.float32(2)", "2)", "3)"),
    "an operator": ("def callback(v): return v * np.float32(2)", "*", "+"),
    "text": ('def callback(v): return getattr(np, "cos")(v)', "cos", "sin"),
    "a lambda": ("callback = lambda v: v * np.float32(2)", "2)", "3)"),
    "a default": ("def callback(v, k=np.float32(2)): return v * k", "2)", "3)"),
    "a keyword default": ("def callback(v, *, k=np.float32(2)): return v * k", "2)", "3)"),
    "a closure": ("def make(k): return lambda v: v * k\ncallback = make(np.float32(2))", "2)", "3)"),
    "a global": ("K = np.float32(2)\ndef callback(v): return v * K", "2)", "3)"),
    "a table": ("T = np.ones(4, np.float32) * 2\ndef callback(v): return v * T", "* 2", "* 3"),
    "a function that it calls": (
        "def f(v): return v * np.float32(2)\ndef callback(v): return f(v)",
        "2)",
        "3)",
    ),
    "a partial": (
        "import functools\ndef f(k, v): return v * k\ncallback = functools.partial(f, np.float32(2))",
        "2)",
        "3)",
    ),
    "text in a generator": (
        'def callback(v): return np.stack(list(getattr(np, "cos")(one) for one in v))',
        "cos",
        "sin",
    ),
    "text in an inner lambda": ('def callback(v): return (lambda: getattr(np, "cos")(v))()', "cos", "sin"),
    "a static method": (_CLASS, "2)", "3)"),
    "a method": (_METHOD, "2)", "3)"),
    "a function of a module": (_MODULE, "2)", "3)"),
    "a handler": (_TRY, "2)", "3)"),
}


@pytest.mark.parametrize("edit", _EDITS)
def test_callbacks_that_differ_in_python_are_told_apart(client: rc.Client, edit: str) -> None:
    """Two backwards that call other Python code are two programs, or are refused because nobody can tell."""
    source, old, new = _EDITS[edit]
    one, other = calling(source), calling(source.replace(old, new))
    assert bits_of(one(jnp.ones(4))) != bits_of(other(jnp.ones(4)))
    client.offload(one, "run/callback")
    with pytest.raises(ProgramMismatch, match="'run/callback'"):
        rc.Client(client.store).restore("run/callback", like=other)


_TWICE = "def callback(v):\n    return v * np.float32(2)"
_DOCUMENTED = 'def callback(v):\n    """Twice."""\n    return v * np.float32(2)'

_COSMETIC = {
    "nothing": (_TWICE, _TWICE),
    "a new docstring": (_TWICE, _DOCUMENTED),
    "another docstring": (_DOCUMENTED, _DOCUMENTED.replace("Twice", "Two times")),
    "a comment": (_TWICE, _TWICE.replace("    return", "    # Twice.\n    return")),
    "moved lines": (_TWICE, "\n" * 30 + _TWICE),
    "an unused global": (_TWICE, "K = 7\n" + _TWICE),
}


@pytest.mark.parametrize("edit", _COSMETIC)
def test_callbacks_that_do_the_same_are_accepted(client: rc.Client, edit: str) -> None:
    """Where a callback's code is, and what is written about it, does not count."""
    before, after = _COSMETIC[edit]
    one = calling(before)
    client.offload(one, "run/callback")
    restored = rc.Client(client.store).restore("run/callback", like=calling(after, "elsewhere.py"))
    assert bits_of(restored(jnp.ones(4))) == bits_of(one(jnp.ones(4)))


def test_a_callback_that_nobody_can_follow_is_told_at_the_offload(client: rc.Client) -> None:
    """An object with state of its own may be anything: the bundle is stored, its handle works, and no other way does."""
    source = "import io\nlog = io.StringIO()\ndef callback(v):\n    log.write('called')\n    return v * np.float32(2)"
    vjp = calling(source)
    handle = client.offload(vjp, "run/callback")
    assert "host callback cannot be told from another one: it holds a _io.StringIO" in str(
        handle.wait().no_program
    )
    assert bits_of(client.restore(handle)(jnp.ones(4))) == bits_of(vjp(jnp.ones(4)))
    with pytest.raises(ProgramMismatch, match="'run/callback' cannot be restored through another VJP object"):
        client.restore("run/callback", like=vjp)
    with pytest.raises(ProgramUnavailable, match="'run/callback'"):
        rc.Client(client.store).restore("run/callback")
