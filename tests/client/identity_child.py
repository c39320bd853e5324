"""A process that imports edited copies of a model and restores through each what the original has stored.

``python -m tests.client.identity_child URL KEY < paths`` reads a JSON map of names to source files, and prints for each
the gradient in lines of text, or the error.
"""

from __future__ import annotations

import importlib.util
import json
import sys
from types import ModuleType
from typing import Any

import jax.numpy as jnp

import residual_client as rc
from residual_store import open_store
from residual_store.errors import GradientRefused
from residual_store.store import Store
from tests.client.bits import bits_of

__all__ = ["imported"]


def imported(path: str) -> ModuleType:
    """The module in a source file."""
    spec = importlib.util.spec_from_file_location("model", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _restored(store: Store, key: str, path: str) -> list[str] | str:
    y, like = imported(path).forward()
    try:
        restored: Any = rc.Client(store).restore(key, like=like)
    except GradientRefused as error:
        return f"{type(error).__name__}: {error}"
    return bits_of(restored(jnp.ones_like(y)))


def main() -> None:
    url, key = sys.argv[1:]
    store = open_store(url)
    paths = json.load(sys.stdin)
    json.dump({name: _restored(store, key, path) for name, path in paths.items()}, sys.stdout)


if __name__ == "__main__":
    main()
