"""Static data: what a node of a custom type says beside its children, as text that is equal where the data are.

Such data can say which child is which, as the keys of a dictionary do, so two that differ must never have one text.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
from collections.abc import Mapping, Set
from enum import Enum
from types import MethodType, ModuleType
from typing import Any

import numpy as np
from jax.tree_util import PyTreeDef

__all__ = ["static_text"]

_PLAIN = (str, int, float, complex, bool, bytes, type(None))
_LONGEST, _DEEPEST, _MOST_PARTS = 500, 100, 1_000_000
_PROTOCOL = 4


def static_text(static: Any) -> str:
    """Static data as text, the same in every process; a long one by its SHA-256.

    What is no plain data is written as `pickle` would take it apart, functions and types by their names.
    What even that cannot take apart, such as a lock, is written by its type, and so is an object within itself.

    >>> static_text(("a", 1)), static_text((slice(3), jnp.float32))
    ("('a', 1)", "tuple(slice(<slice>, tuple(None, 3, None)), <float32>)")
    """
    text = ascii(static) if _is_plain(static) else _Writer().text(static)
    return text if len(text) <= _LONGEST else "sha256 " + hashlib.sha256(text.encode()).hexdigest()


def _is_plain(static: Any) -> bool:
    pending = [static]
    while pending:
        value = pending.pop()
        if type(value) in (tuple, list):
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
    """The name of what is known by its name: a type, a module, a function, a member of an enumeration."""
    with contextlib.suppress(Exception):
        if isinstance(value, Enum):
            return f"{type(value).__qualname__}.{value.name}"
        if isinstance(value, type | ModuleType) or (callable(value) and not isinstance(value, MethodType)):
            name = getattr(value, "__qualname__", None) or getattr(value, "__name__", None)
            return name if isinstance(name, str) else None
    return None


def _parts_of(value: Any) -> list[Any] | None:
    """What a value consists of, in order; None if nothing can tell, whatever a user's class does."""
    with contextlib.suppress(Exception):
        if type(value) in (tuple, list) or isinstance(value, Set):
            return list(value)
        if isinstance(value, Mapping):
            return list(value.items())
        if isinstance(value, np.ndarray) and not value.dtype.hasobject:
            return [str(value.dtype), value.shape, hashlib.sha256(value.tobytes()).hexdigest()]
        if isinstance(value, PyTreeDef):
            return [value.node_data(), *value.children()]
        if dataclasses.is_dataclass(value):
            return [
                (entry.name, getattr(value, entry.name))
                for entry in dataclasses.fields(value)
                if entry.compare
            ]
        return _taken_apart(value.__reduce_ex__(_PROTOCOL))
    return None


def _taken_apart(reduced: str | tuple[Any, ...]) -> list[Any]:
    """The parts of what `object.__reduce_ex__` gives: a name, or what makes the object, of what, its state and its items."""
    if isinstance(reduced, str):
        return [reduced]
    state = reduced[2] if len(reduced) > 2 else None
    states = state if isinstance(state, tuple) and len(state) == 2 else (state,)
    items = [list(each) for each in reduced[3:5] if each is not None]
    return [*reduced[:2], *map(_lasting, states), *items]


def _lasting(state: Any) -> Any:
    """The attributes in a state but the hashes that objects keep, which are others in each process."""
    if not isinstance(state, dict):
        return state
    return {name: part for name, part in state.items() if "hash" not in str(name)}
