"""Host callbacks: a digest of the Python functions that a backward pass calls on the host.

StableHLO says only that a callback is called, not which one, so two programs that differ in a callback would have one
fingerprint.
The digest follows a function's code, defaults, closure, attributes and the globals that it names.
Of a module that is neither Python's nor installed, the attributes count that are taken from it by name, or all of them if it
goes anywhere else, such as into a list or another function.
What it cannot follow it refuses, and then such a bundle can be restored from its handle only.
"""

from __future__ import annotations

import dis
import functools
import hashlib
import inspect
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from residual_client.releases import content_of, is_installed, is_of_a_release, release_of
from residual_client.trees import describe

__all__ = ["Unfollowable", "digest_callbacks"]

_PLAIN = (str, int, float, complex, bool, bytes, type(None), type(Ellipsis))
_DEEPEST = 50
_OF_EVERY_CLASS = {
    "__module__",
    "__dict__",
    "__weakref__",
    "__doc__",
    "__firstlineno__",
    "__static_attributes__",
}
_REACHES_ANYTHING = {
    "globals",
    "locals",
    "eval",
    "exec",
    "open",
    "environ",
    "getenv",
    "__import__",
    "import_module",
    "_getframe",
    "argv",
    "modules",
    "input",
    "stdin",
    "load",
    "loadtxt",
    "genfromtxt",
    "fromfile",
    "memmap",
    "read_text",
    "read_bytes",
    "__doc__",
    "__annotations__",
}
_DOCUMENTED: int = getattr(inspect, "CO_HAS_DOCSTRING", 0)
_LOADS = ("LOAD_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS")


class Unfollowable(Exception):
    """A callback holds something whose content cannot be told, such as an open file."""


def digest_callbacks(callbacks: Iterable[tuple[Any, Any]]) -> str | None:
    """The SHA-256 of all callbacks in order, each with the treedef of its operands, or None if there are none.

    Raises `Unfollowable`.

    >>> operands = jax.tree.structure((0,))
    >>> digest_callbacks([(lambda x: x * 2, operands)]) == digest_callbacks([(lambda x: x * 3, operands)])
    False
    """
    walk = _Walk()
    for callback, operands in callbacks:
        walk.add([callback, repr(describe(operands))], 0)
    return walk.hexdigest() if walk.seen else None


class _Walk:
    def __init__(self) -> None:
        self._hash = hashlib.sha256()
        self.seen: dict[int, Any] = {}
        self._by_type: Mapping[type, Callable[[Any, int], None]] = {
            types.FunctionType: self._function,
            types.MethodType: lambda value, depth: self._all(
                "method", [value.__func__, value.__self__], depth
            ),
            types.BuiltinFunctionType: self._builtin,
            staticmethod: lambda value, depth: self._all("static method", [value.__func__], depth),
            classmethod: lambda value, depth: self._all("class method", [value.__func__], depth),
            functools.partial: lambda value, depth: self._all(
                "partial", [value.func, value.args, value.keywords], depth
            ),
            tuple: lambda value, depth: self._all("tuple", value, depth),
            list: lambda value, depth: self._all("list", value, depth),
            dict: lambda value, depth: self._all(
                "dict", [part for item in value.items() for part in item], depth
            ),
            frozenset: lambda value, depth: self._all("set", sorted(value, key=repr), depth),
            types.CodeType: self._code,
            types.ModuleType: self._module,
        }

    def hexdigest(self) -> str:
        return self._hash.hexdigest()

    def _say(self, *words: object) -> None:
        self._hash.update(repr(words).encode("utf-8", "surrogatepass"))

    def add(self, value: Any, depth: int) -> None:
        if depth > _DEEPEST:
            raise Unfollowable("it is nested too deeply")
        if type(value) in _PLAIN:
            self._say(type(value).__name__, value)
        elif id(value) in self.seen:
            self._say("again", list(self.seen).index(id(value)))
        else:
            self.seen[id(value)] = value
            try:
                self._by_type.get(type(value), self._other)(value, depth + 1)
            except (ValueError, TypeError, AttributeError) as error:
                raise Unfollowable(f"it holds a {_name(type(value))}: {error}") from error

    def _all(self, what: str, values: Iterable[Any], depth: int) -> None:
        values = list(values)
        self._say(what, len(values))
        for value in values:
            self.add(value, depth)

    def _other(self, value: Any, depth: int) -> None:
        if isinstance(value, np.ndarray | np.generic | jax.Array):
            self._array(value, depth)
        elif isinstance(value, np.dtype):
            self._say("dtype", repr(value))
        elif isinstance(value, type):
            self._class(value, depth)
        elif isinstance(value, np.ufunc) and value in vars(np).values():
            self._say("ufunc", str(value))
        else:
            self._instance(value, depth)

    def _array(self, value: Any, depth: int) -> None:
        """An array is its bytes, unless these are references, or there is more to it, such as a mask."""
        host = np.asarray(value)
        if isinstance(value, np.ndarray) and type(value) not in (np.ndarray, np.memmap):
            raise Unfollowable(f"it holds a {_name(type(value))}")
        if host.dtype == object:
            self._all("objects", [host.shape, *host.ravel().tolist()], depth)
        elif host.dtype.hasobject:
            raise Unfollowable(f"it holds an array of {host.dtype}")
        else:
            self._say(repr(host.dtype), host.shape, host.strides, hashlib.sha256(host.tobytes()).hexdigest())

    def _builtin(self, value: Any, depth: int) -> None:
        owner: Any = value.__self__
        self._say("builtin", value.__name__)
        self.add(owner.__name__ if isinstance(owner, types.ModuleType) else owner, depth)

    def _class(self, cls: type, depth: int) -> None:
        self._say("class", cls.__module__, cls.__qualname__)
        if not is_of_a_release(cls):
            self._all("bases", [type(cls), *cls.__bases__], depth)
            own = {name: value for name, value in sorted(vars(cls).items()) if name not in _OF_EVERY_CLASS}
            self.add(own, depth)

    def _instance(self, value: Any, depth: int) -> None:
        """An object of a class that is written in Python is its class and its attributes; of others nobody knows."""
        kind = type(value)
        written = all(one is object or not is_installed(one.__module__) for one in kind.__mro__)
        if not written or not hasattr(value, "__dict__"):
            raise Unfollowable(f"it holds a {_name(kind)}")
        self._all("instance", [kind, vars(value)], depth)

    def _function(self, function: types.FunctionType, depth: int) -> None:
        module = str(function.__globals__.get("__name__"))
        cells = [cell.cell_contents for cell in function.__closure__ or ()]
        bound = [function.__defaults__, function.__kwdefaults__, vars(function), *cells]
        self._say("function", function.__name__)
        self._all("bound", bound, depth)
        if (release := release_of(function)) is not None:
            self._say("installed", module, function.__qualname__, release)
            return
        self._code(function.__code__, depth)
        for first, *names in sorted(set(_loads(function.__code__))):
            if first in function.__globals__:
                self._say("global", first, names)
                self._reached(function.__globals__[first], names, depth)

    def _reached(self, value: Any, names: Sequence[str], depth: int) -> None:
        """What the ``names`` come to, as far as they lead through modules whose content counts."""
        for name in names:
            content = content_of(value) if type(value) is types.ModuleType else {}
            if name not in content:
                break
            value = content[name]
        self.add(value, depth)

    def _module(self, module: types.ModuleType, depth: int) -> None:
        self._say("module", module.__name__)
        content = content_of(module)
        if "__getattr__" in content:
            raise Unfollowable(
                f"it uses {module.__name__}, which makes its attributes when they are asked for"
            )
        self.add(content, depth)

    def _code(self, code: types.CodeType, depth: int) -> None:
        for instruction in dis.get_instructions(code):
            if instruction.opname == "IMPORT_NAME":
                raise Unfollowable(f"it imports {instruction.argval} when it is called")
        if dynamic := _REACHES_ANYTHING & set(code.co_names):
            raise Unfollowable(f"it uses {min(dynamic)}, which reaches anything")
        arguments = (
            code.co_argcount,
            code.co_posonlyargcount,
            code.co_kwonlyargcount,
            code.co_flags & ~_DOCUMENTED,
        )
        self._say(code.co_code, code.co_exceptiontable, arguments)
        self._say(code.co_names, code.co_varnames, code.co_cellvars, code.co_freevars)
        self._all("constants", _constants(code), depth)


def _constants(code: types.CodeType) -> tuple[Any, ...]:
    """The constants without the docstring; up to Python 3.13 a def has its docstring, or None, as the first one."""
    documented = code.co_flags & _DOCUMENTED if _DOCUMENTED else not code.co_name.startswith("<")
    return code.co_consts[1:] if documented else code.co_consts


def _loads(code: types.CodeType) -> Iterator[tuple[str, ...]]:
    """The globals that code loads, by name, each with the attributes that are taken from it at once."""
    load: tuple[str, ...] = ()
    for instruction in dis.get_instructions(code):
        if load and instruction.opname in ("LOAD_ATTR", "LOAD_METHOD"):
            load += (instruction.argval,)
            continue
        if load:
            yield load
        load = (instruction.argval,) if instruction.opname in _LOADS else ()
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _loads(constant)


def _name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"
