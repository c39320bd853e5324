"""Host callbacks: a digest of the Python functions that a backward pass calls on the host.

StableHLO says only that a callback is called, not which one, so two programs that differ in a callback would have one
fingerprint.
The digest follows a function's code, defaults, closure and the globals that it names, and refuses what it cannot follow.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
import sys
import types
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import jax
import numpy as np

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


class Unfollowable(Exception):
    """A callback holds something whose content cannot be told, such as an open file."""


def digest_callbacks(callbacks: Iterable[Any]) -> str | None:
    """The SHA-256 of all callbacks in order, or None if there are none; raises `Unfollowable`.

    >>> digest_callbacks([lambda x: x * 2]) == digest_callbacks([lambda x: x * 3])
    False
    """
    walk = _Walk()
    for callback in callbacks:
        walk.add(callback, 0)
    return walk.hexdigest() if walk.seen else None


class _Walk:
    def __init__(self) -> None:
        self._hash = hashlib.sha256()
        self.seen: dict[int, Any] = {}

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
            self._follow(value, depth + 1)

    def _follow(self, value: Any, depth: int) -> None:
        match value:
            case types.FunctionType():
                self._function(value, depth)
            case types.MethodType():
                self._all("method", [value.__func__, value.__self__], depth)
            case staticmethod() | classmethod():
                self._all(type(value).__name__, [value.__func__], depth)
            case functools.partial():
                self._all("partial", [value.func, *value.args, *value.keywords.items()], depth)
            case types.ModuleType():
                self._say("module", value.__name__)
            case type():
                self._class(value, depth)
            case types.BuiltinFunctionType() | np.ufunc():
                self._say(type(value).__name__, getattr(value, "__module__", ""), value.__name__)
            case _:
                self._data(value, depth)

    def _data(self, value: Any, depth: int) -> None:
        match value:
            case tuple() | list():
                self._all(type(value).__qualname__, value, depth)
            case dict():
                self._all("dict", [part for item in value.items() for part in item], depth)
            case np.ndarray() | np.generic() | jax.Array():
                host = np.asarray(value)
                self._say(host.dtype.name, host.shape, hashlib.sha256(host.tobytes()).hexdigest())
            case np.dtype():
                self._say("dtype", value.name)
            case _:
                self._instance(value, depth)

    def _all(self, what: str, values: Iterable[Any], depth: int) -> None:
        self._say(what)
        for value in values:
            self.add(value, depth)

    def _class(self, cls: type, depth: int) -> None:
        self._say("class", cls.__module__, cls.__qualname__)
        if not _is_installed(cls.__module__):
            self._all("bases", cls.__bases__, depth)
            own = {name: value for name, value in sorted(vars(cls).items()) if name not in _OF_EVERY_CLASS}
            self.add(own, depth)

    def _instance(self, value: Any, depth: int) -> None:
        """An object of a class that is written in Python is its class and its attributes; of others nobody knows."""
        kind = type(value)
        written = all(one is object or not _is_installed(one.__module__) for one in kind.__mro__)
        if not written or not hasattr(value, "__dict__"):
            raise Unfollowable(f"it holds a {kind.__module__}.{kind.__qualname__}")
        self._all("instance", [kind, vars(value)], depth)

    def _function(self, function: types.FunctionType, depth: int) -> None:
        if _is_installed(function.__module__):
            self._say("installed", function.__module__, function.__qualname__)
            return
        self._code(function.__code__, depth)
        cells = [cell.cell_contents for cell in function.__closure__ or ()]
        self._all("bound", [function.__defaults__, function.__kwdefaults__, *cells], depth)
        names = sorted(_names(function.__code__))
        for name in names:
            if name in function.__globals__:
                self._say("global", name)
                self._global(function.__globals__[name], names, depth)

    def _global(self, value: Any, names: list[str], depth: int) -> None:
        self.add(value, depth)
        if isinstance(value, types.ModuleType) and not _is_installed(value.__name__):
            for name in names:
                if name in vars(value):
                    self._say("of module", name)
                    self.add(vars(value)[name], depth)

    def _code(self, code: types.CodeType, depth: int) -> None:
        self._say(code.co_code, code.co_names, code.co_varnames, code.co_freevars)
        for constant in _constants(code):
            if isinstance(constant, types.CodeType):
                self._code(constant, depth)
            elif isinstance(constant, frozenset):
                self._all("set", sorted(constant, key=repr), depth)
            else:
                self.add(constant, depth)


def _constants(code: types.CodeType) -> tuple[Any, ...]:
    """The constants without the docstring; up to Python 3.13 a def has its docstring, or None, as the first one."""
    flag = getattr(inspect, "CO_HAS_DOCSTRING", None)
    documented = code.co_flags & flag if flag is not None else not code.co_name.startswith("<")
    return code.co_consts[1:] if documented else code.co_consts


def _names(code: types.CodeType) -> set[str]:
    names = set(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            names |= _names(constant)
    return names


def _is_installed(module: str | None) -> bool:
    """Whether a module belongs to Python or to an installed package, whose release stands for its content."""
    top = (module or "").partition(".")[0]
    if top in sys.stdlib_module_names and top != "__main__":
        return True
    spec = getattr(sys.modules.get(top), "__spec__", None)
    origin = getattr(spec, "origin", None) or ""
    return any(part in ("site-packages", "dist-packages") for part in Path(origin).parts)
