"""Static data: what a node of a custom type says beside its children, as text that is equal where the data are.

Such data can say which child is which, as the keys of a dictionary do, so two that differ must never have one text.
"""

from __future__ import annotations

import contextlib
import copyreg
import dataclasses
import functools
import hashlib
import re
import sys
from collections.abc import Mapping, Set
from enum import Enum
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import PyTreeDef

__all__ = ["static_text"]

_PLAIN = (str, int, float, complex, bool, bytes, type(None))
_LONGEST, _DEEPEST, _MOST_PARTS = 500, 250, 100_000
_PROTOCOL = 4
_OF_THIS_PROCESS = re.compile("_.*(hash|cache).*")
"""Attributes in which objects keep what they have computed; a hash differs between processes."""


def static_text(static: Any) -> str:
    """Static data as text, the same in every process; a long one by its SHA-256.

    What is no plain data is written as `pickle` would take it apart, functions and types by their names.
    What even that cannot take apart, such as a lock, is written by its type, and so is an object within itself.

    >>> static_text(("a", 1)), static_text((slice(3), int))
    ("('a', 1)", 'tuple(slice(<builtins.slice>, tuple(None, 3, None)), <builtins.int>)')
    """
    text = ascii(static) if _is_plain(static) else _Writer().text(static)
    return text if len(text) <= _LONGEST else "sha256 " + hashlib.sha256(text.encode()).hexdigest()


def _is_plain(static: Any) -> bool:
    pending, seen = [static], 0
    while pending:
        value, seen = pending.pop(), seen + 1
        if type(value) in (tuple, list) and seen < _MOST_PARTS:
            pending.extend(value)
        elif type(value) not in _PLAIN:
            return False
    return True


class _Writer:
    """Writes one text, of so many parts at most."""

    def __init__(self) -> None:
        self._left = _MOST_PARTS
        self._open: list[int] = []

    def text(self, value: Any) -> str:
        self._left -= 1
        kind = type(value)
        if kind in _PLAIN:
            return ascii(value)
        if self._left <= 0 or len(self._open) >= _DEEPEST or id(value) in self._open:
            return f"<{kind.__qualname__}>"
        if (name := _name_of(value)) is not None:
            return f"<{name}>"
        parts = _parts_of(value)
        if parts is None:
            return f"<{kind.__qualname__}>"
        self._open.append(id(value))
        texts = [self.text(part) for part in parts]
        self._open.pop()
        # Sets have another order in each process.
        return f"{kind.__qualname__}({', '.join(sorted(texts) if isinstance(value, Set) else texts)})"


def _name_of(value: Any) -> str | None:
    """The name of what is found by its name: a module, a type or function in one, a member of an enumeration."""
    with contextlib.suppress(Exception):
        if isinstance(value, Enum) and value.name is not None:
            return f"{type(value).__qualname__}.{value.name}"
        if isinstance(value, ModuleType):
            return value.__name__
        if isinstance(value, type) or callable(value):
            found = functools.reduce(getattr, value.__qualname__.split("."), sys.modules[value.__module__])
            if found is value or (isinstance(value, type) and "<locals>" in value.__qualname__):
                return f"{_module_of(value)}.{value.__qualname__}"
    return None


def _module_of(value: Any) -> str:
    """The name of its module; that of a script as another process would import it."""
    if value.__module__ != "__main__":
        return str(value.__module__)
    main = sys.modules["__main__"]
    spec = getattr(main, "__spec__", None)
    return spec.name if spec is not None else Path(getattr(main, "__file__", None) or main.__name__).stem


def _parts_of(value: Any) -> list[Any] | None:
    """What a value consists of, in order; None if nothing can tell, whatever a user's class does."""
    with contextlib.suppress(Exception):
        if type(value) in (tuple, list) or isinstance(value, Set):
            return list(value)
        if isinstance(value, Mapping):
            attributes = getattr(value, "__dict__", None)
            return [*value.items(), *([_lasting(value, attributes)] if attributes else [])]
        if isinstance(value, jax.Array):
            is_key = jnp.issubdtype(value.dtype, jax.dtypes.prng_key)
            value = np.asarray(jax.random.key_data(value) if is_key else value)
        if isinstance(value, np.ndarray) and not value.dtype.hasobject:
            return [str(value.dtype), value.shape, hashlib.sha256(value.tobytes()).hexdigest()]
        if isinstance(value, PyTreeDef):
            return [value.node_data(), *value.children()]
        if isinstance(value, functools.partial):
            return [value.func, value.args, value.keywords]
        if isinstance(value, FunctionType):
            return _parts_of_function(value)
        if callable(value) and hasattr(value, "__wrapped__"):
            return [value.__wrapped__, {name: part for name, part in vars(value).items() if name[:2] != "__"}]
        if dataclasses.is_dataclass(value):
            counted = [entry.name for entry in dataclasses.fields(value) if entry.compare]
            return [(name, getattr(value, name, None)) for name in counted]
        reduce = copyreg.dispatch_table.get(type(value))
        return _taken_apart(value, reduce(value) if reduce is not None else value.__reduce_ex__(_PROTOCOL))
    return None


def _parts_of_function(function: FunctionType) -> list[Any]:
    """Those of a function within a function: it shares its name with others, which differ in what they do or refer to."""
    code = function.__code__
    cells = [cell.cell_contents for cell in function.__closure__ or ()]
    constants = [one for one in code.co_consts if type(one) in _PLAIN]
    return [function.__qualname__, code.co_code, code.co_names, constants, cells, function.__defaults__]


def _taken_apart(value: Any, reduced: str | tuple[Any, ...]) -> list[Any]:
    """The parts of what `object.__reduce_ex__` gives: a name, or what makes the object, of what, its state and its items."""
    if isinstance(reduced, str):
        return [reduced]
    state = reduced[2] if len(reduced) > 2 else None
    states = state if isinstance(state, tuple) and len(state) == 2 else (state,)
    items = [list(each) for each in reduced[3:5] if each is not None]
    # An empty one may only come from looking.
    return [*reduced[:2], *(_lasting(value, one) for one in states if one), *items]


def _lasting(value: Any, state: Any) -> Any:
    """The attributes in a state but those that the object has computed from the others."""
    if not isinstance(state, dict):
        return state
    return {
        name: part
        for name, part in state.items()
        if not isinstance(getattr(type(value), str(name), None), functools.cached_property)
        and _OF_THIS_PROCESS.fullmatch(str(name)) is None
    }
