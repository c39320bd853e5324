"""Releases: what belongs to Python or to an installed package, whose release stands for its content."""

from __future__ import annotations

import contextlib
import importlib.metadata
import sys
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

__all__ = ["content_of", "is_installed", "is_of_a_release", "release_of"]

_OF_EVERY_MODULE = {
    "__annotations__",
    "__builtins__",
    "__cached__",
    "__doc__",
    "__file__",
    "__loader__",
    "__name__",
    "__package__",
    "__path__",
    "__spec__",
}


def content_of(module: ModuleType) -> dict[str, Any]:
    """What is in a module, sorted; nothing, if its release stands for that.

    >>> content_of(contextlib)
    {}
    """
    if is_installed(module.__name__) and sys.modules.get(module.__name__) is module:
        return {}
    return {name: value for name, value in sorted(vars(module).items()) if name not in _OF_EVERY_MODULE}


def is_of_a_release(cls: type) -> bool:
    """Whether a class is what an installed module has under its name; it can be made elsewhere, as `types.new_class` does.

    >>> is_of_a_release(Path), is_of_a_release(type("Path", (), {}))
    (True, False)
    """
    found: Any = sys.modules.get(cls.__module__)
    for name in cls.__qualname__.split("."):
        found = getattr(found, name, None)
    return found is cls and is_installed(cls.__module__)


def release_of(function: FunctionType) -> str | None:
    """The release of the package that a function belongs to, as far as that tells; None if it is in no installed module.

    >>> release_of(content_of) is None, release_of(contextlib.contextmanager)
    (True, '')
    """
    name = str(function.__globals__.get("__name__"))
    if not is_installed(name) or vars(sys.modules.get(name, object)) is not function.__globals__:
        return None
    top = name.partition(".")[0]
    release = str(getattr(sys.modules.get(top), "__version__", ""))
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        release = release or importlib.metadata.version(top)
    return release


def is_installed(module: str | None) -> bool:
    """Whether a name is that of a module of Python or of an installed package.

    >>> is_installed("contextlib"), is_installed("no_such_module")
    (True, False)
    """
    top = (module or "").partition(".")[0]
    if top in sys.stdlib_module_names and top != "__main__":
        return True
    spec = getattr(sys.modules.get(top), "__spec__", None)
    origin = getattr(spec, "origin", None) or ""
    return any(part in ("site-packages", "dist-packages") for part in Path(origin).parts)
