"""Host callbacks: StableHLO says that Python is called, and not what it does, so their code is a part of the identity."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import residual_client as rc
from residual_store.errors import ProgramMismatch, ProgramUnavailable
from tests.cases.case import ramp
from tests.client.bits import bits_of


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

_MODULE_IN_A_MODULE = """
import types
package = types.ModuleType("package")
package.ops = types.ModuleType("package.ops")
package.ops.scale = lambda v: v * np.float32(2)

def callback(v):
    return package.ops.scale(v)
"""
_ATTRIBUTE = """
def callback(v):
    return v * callback.scale

callback.scale = np.float32(2)
"""
_INSTANCE = """
class Scale:
    def __init__(self, k):
        self.k = k

    def __call__(self, v):
        return v * self.k

callback = Scale(np.float32(2))
"""
_DECORATED = """
import functools

def scaled(k):
    def decorate(f):
        @functools.wraps(f)
        def wrapped(v):
            return f(v) * k
        return wrapped
    return decorate

@scaled(np.float32(2))
def callback(v):
    return v
"""

_METACLASS = """
class Meta(type):
    k = np.float32(2)

class Ops(metaclass=Meta):
    pass

def callback(v):
    return v * Ops.k
"""
_NEW_CLASS = """
import types
Ops = types.new_class("Ops", (), {}, lambda names: names.update(k=np.float32(2)))

def callback(v):
    return v * Ops.k
"""
_OPS = _MODULE.partition("def callback")[0]
"""A module ``ops`` whose function ``scale`` doubles."""

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
    "a function of a module in a module": (_MODULE_IN_A_MODULE, "2)", "3)"),
    "a function of a module by its name": (
        _MODULE.replace("ops.scale(v)", "getattr(ops, 'scale')(v)"),
        "2)",
        "3)",
    ),
    "how arguments are taken": (
        "def callback(*v): return v[0] * np.ones(4, np.float32)",
        "(*v)",
        "(v)",
    ),
    "a metaclass": (_METACLASS, "2)", "3)"),
    "a class that the standard library made": (_NEW_CLASS, "2)", "3)"),
    "the release that a module tells of itself": (
        _OPS + "ops.__version__ = '2'\ndef callback(v): return v * np.float32(ops.__version__)",
        "'2'",
        "'3'",
    ),
    "a module in a closure": (
        _OPS + "def make(m): return lambda v: m.scale(v)\ncallback = make(ops)",
        "2)",
        "3)",
    ),
    "a module as a default": (_OPS + "def callback(v, m=ops): return m.scale(v)", "2)", "3)"),
    "a module in a list": (_OPS + "all = [ops]\ndef callback(v): return all[0].scale(v)", "2)", "3)"),
    "a module in a dict": (_OPS + "all = {'o': ops}\ndef callback(v): return all['o'].scale(v)", "2)", "3)"),
    "a module that is passed on": (
        _OPS + "def use(m, v): return m.scale(v)\ndef callback(v): return use(ops, v)",
        "2)",
        "3)",
    ),
    "a module under another name": (
        _OPS + "def callback(v):\n    m = ops\n    return use(m, v)\ndef use(m, v): return m.scale(v)",
        "2)",
        "3)",
    ),
    "a module in an instance": (
        _OPS + _INSTANCE.replace("v * self.k", "self.k.scale(v)").replace("(np.float32(2))", "(ops)"),
        "np.float32(2)",
        "np.float32(3)",
    ),
    "a module of a module that is passed on": (
        _MODULE_IN_A_MODULE.replace("package.ops.scale(v)", "use(package.ops, v)")
        + "def use(m, v): return m.scale(v)",
        "2)",
        "3)",
    ),
    "a module that makes its attributes": (
        _OPS + "ops.__getattr__ = lambda name: np.float32(2)\ndef callback(v): return v * ops.k",
        "name: np.float32(2)",
        "name: np.float32(3)",
    ),
    "an array of objects": (
        "t = np.empty(1, object)\nt[0] = [np.float32(2)]\ndef callback(v): return v * t[0][0]",
        "2)",
        "3)",
    ),
    "a mask": (
        "t = np.ma.masked_array([2, 3], [0, 1])\ndef callback(v): return (v * t.sum()).astype(np.float32)",
        "[0, 1]",
        "[1, 0]",
    ),
    "an attribute of the function": (_ATTRIBUTE, "2)", "3)"),
    "the state of an instance": (_INSTANCE, "2)", "3)"),
    "a decorator": (_DECORATED, "2)", "3)"),
    "a ufunc made of Python": (
        "f = np.frompyfunc(lambda x: x * 2.0, 1, 1)\ndef callback(v): return f(v).astype(np.float32)",
        "2.0",
        "3.0",
    ),
    "a method of a dict": (
        "get = {'k': np.float32(2)}.get\ndef callback(v): return v * get('k')",
        "2)",
        "3)",
    ),
}


@pytest.mark.parametrize("edit", _EDITS)
def test_callbacks_that_differ_in_python_are_told_apart(client: rc.Client, edit: str) -> None:
    """Two backwards that call other Python code are two programs, or are refused because nobody can tell."""
    source, old, new = _EDITS[edit]
    one, other = calling(source), calling(source.replace(old, new))
    assert bits_of(one(jnp.ones(4))) != bits_of(other(jnp.ones(4)))
    client.offload(one, "run/callback").wait()
    with pytest.raises(ProgramMismatch, match="'run/callback'"):
        rc.Client(client.store).restore("run/callback", like=other)


def test_a_module_that_the_callback_imports_itself(
    client: rc.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An import inside of the callback names code too: with other code under that name it is another program."""
    source = "def callback(v):\n    from ops_of_the_callback import scale\n    return v * scale"

    def module(scale: float) -> ModuleType:
        made = ModuleType("ops_of_the_callback")
        vars(made)["scale"] = np.float32(scale)
        return made

    monkeypatch.setitem(sys.modules, "ops_of_the_callback", module(2))
    one = calling(source)
    client.offload(one, "run/callback").wait()
    monkeypatch.setitem(sys.modules, "ops_of_the_callback", module(3))
    with pytest.raises(ProgramMismatch, match="'run/callback'"):
        rc.Client(client.store).restore("run/callback", like=calling(source))


_TWICE = "def callback(v):\n    return v * np.float32(2)"
_DOCUMENTED = 'def callback(v):\n    """Twice."""\n    return v * np.float32(2)'

_OBJECTS = "t = np.array([np.float32(2), None], object)\ndef callback(v): return v * t[0]"

_COSMETIC = {
    "nothing": (_TWICE, _TWICE),
    "a new docstring": (_TWICE, _DOCUMENTED),
    "another docstring": (_DOCUMENTED, _DOCUMENTED.replace("Twice", "Two times")),
    "a comment": (_TWICE, _TWICE.replace("    return", "    # Twice.\n    return")),
    "moved lines": (_TWICE, "\n" * 30 + _TWICE),
    "an unused global": (_TWICE, "K = 7\n" + _TWICE),
    "what a module has besides": (_MODULE, _MODULE.replace("def callback", "ops.k = 7\ndef callback")),
    "an array of the same objects": (_OBJECTS, _OBJECTS + "\n"),
}


@pytest.mark.parametrize("edit", _COSMETIC)
def test_callbacks_that_do_the_same_are_accepted(client: rc.Client, edit: str) -> None:
    """Where a callback's code is, and what is written about it, does not count."""
    before, after = _COSMETIC[edit]
    one = calling(before)
    client.offload(one, "run/callback").wait()
    restored = rc.Client(client.store).restore("run/callback", like=calling(after, "elsewhere.py"))
    assert bits_of(restored(jnp.ones(4))) == bits_of(one(jnp.ones(4)))


def test_a_callback_with_a_variable_that_has_no_value_yet(client: rc.Client) -> None:
    """A closure may be empty when the backward is stored; the offload goes on all the same."""
    source = (
        "def make():\n    def inner(v):\n        return later if v is None else v * np.float32(2)\n"
        "    return inner\n    later = 1\ncallback = make()"
    )
    vjp = calling(source)
    handle = client.offload(vjp, "run/callback")
    assert bits_of(client.restore(handle)(jnp.ones(4))) == bits_of(vjp(jnp.ones(4)))


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
