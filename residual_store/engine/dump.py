"""The dump of a database: what tensorstore tells of its manifest and of the nodes of its tree."""

from __future__ import annotations

import ctypes
import importlib.metadata
import sys
from typing import Any

import tensorstore as ts

__all__ = ["dump"]

_LEAKS = importlib.metadata.version("tensorstore") == "0.1.86"
"""That release never frees the keys and values of a dict that it makes of JSON."""

_UNSHARED = 3
"""What `sys.getrefcount` says of such an object in a local variable: that, its own argument, and the reference left over."""

_release = ctypes.PYFUNCTYPE(None, ctypes.py_object)(("Py_DecRef", ctypes.pythonapi))


def dump(base: ts.KvStore, node: str | None, *, context: ts.Context) -> Any:
    """The manifest of the database in ``base``, or a ``node`` of its tree, as
    `tensorstore.ocdbt.dump <https://google.github.io/tensorstore/python/api/tensorstore.ocdbt.dump.html>`_ gives it.

    Raises ValueError for what is damaged.
    """
    found = ts.ocdbt.dump(base, node, context=context).result()
    return _taken(found) if _LEAKS else found


def _taken(found: Any) -> Any:
    """The same, in containers of our own; without this a server grows by 5 KiB and more with each bundle that it reads."""
    if type(found) is list:
        return [_taken(one) for one in found]
    if type(found) is not dict:
        return found
    taken = {}
    while found:
        key, value = found.popitem()
        if sys.getrefcount(key) == _UNSHARED:
            _release(key)
        if sys.getrefcount(value) == _UNSHARED:
            _release(value)
        taken[key] = _taken(value)
    return taken
