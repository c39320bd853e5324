"""Host callbacks: a digest of the Python functions that a backward pass calls on the host.

StableHLO says only that a callback is called, not which one, so two programs that differ in a callback would have one
fingerprint.
The digest follows a function's code, defaults, closure and the globals that it names, and refuses what it cannot follow.
"""

from __future__ import annotations

import functools
import hashlib
import types
from collections.abc import Iterable
from typing import Any

import jax
import numpy as np

__all__ = ["Unfollowable", "digest_callbacks"]

_PLAIN = (str, int, float, complex, bool, bytes, type(None), type(Ellipsis))
_DEEPEST = 50


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
            case functools.partial():
                self._all("partial", [value.func, *value.args, *value.keywords.items()], depth)
            case tuple() | list():
                self._all(type(value).__qualname__, value, depth)
            case dict():
                self._all("dict", [part for item in value.items() for part in item], depth)
            case np.ndarray() | np.generic() | jax.Array():
                host = np.asarray(value)
                self._say(host.dtype.name, host.shape, hashlib.sha256(host.tobytes()).hexdigest())
            case types.ModuleType() | types.BuiltinFunctionType() | type() | np.ufunc():
                self._say(type(value).__name__, getattr(value, "__module__", ""), value.__name__)
            case np.dtype():
                self._say("dtype", value.name)
            case _ if callable(getattr(value, "__wrapped__", None)):
                self._all("wrapped", [value.__wrapped__], depth)
            case _:
                raise Unfollowable(f"it holds a {type(value).__module__}.{type(value).__qualname__}")

    def _all(self, what: str, values: Iterable[Any], depth: int) -> None:
        self._say(what)
        for value in values:
            self.add(value, depth)

    def _function(self, function: types.FunctionType, depth: int) -> None:
        if function.__module__.partition(".")[0] in ("jax", "numpy"):
            self._say("library", function.__module__, function.__qualname__)
            return
        self._code(function.__code__, depth)
        cells = [cell.cell_contents for cell in function.__closure__ or ()]
        self._all("bound", [function.__defaults__, function.__kwdefaults__, *cells], depth)
        for name in sorted(_names(function.__code__)):
            if name in function.__globals__:
                self._say("global", name)
                self.add(function.__globals__[name], depth)

    def _code(self, code: types.CodeType, depth: int) -> None:
        constants = code.co_consts
        # A docstring is the first constant; it must not count.
        if constants and isinstance(constants[0], str):
            constants = constants[1:]
        self._say(code.co_code, code.co_names, code.co_varnames, code.co_freevars)
        for constant in constants:
            if isinstance(constant, types.CodeType):
                self._code(constant, depth)
            elif isinstance(constant, frozenset):
                self._all("set", sorted(constant, key=repr), depth)
            else:
                self.add(constant, depth)


def _names(code: types.CodeType) -> set[str]:
    names = set(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            names |= _names(constant)
    return names
