"""The examples in docstrings run and print what they say."""

from __future__ import annotations

import doctest
import importlib
import pkgutil
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import residual_client
import residual_server
import residual_store
from residual_store import Bundle, Settings, open_store

_KEY = "exp1/step-12/layer-3"


def _modules() -> Iterator[Any]:
    """All modules of the three packages but the demo, whose tests run it."""
    for package in (residual_store, residual_server, residual_client):
        yield package
        for found in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            if ".demo" not in found.name:
                yield importlib.import_module(found.name)


def _examples() -> list[doctest.DocTest]:
    finder = doctest.DocTestFinder(exclude_empty=True)
    return [test for module in _modules() for test in finder.find(module) if test.examples]


def _layer(W: Any, x: Any) -> Any:  # noqa: N803 - as in the examples
    return jnp.tanh(x @ W)


@pytest.fixture
def names() -> Iterator[dict[str, Any]]:
    """What an example may use without saying where it comes from: one layer, forward done, and a client."""
    W, x = jnp.ones((3, 2)), jnp.ones((4, 3))  # noqa: N806 - as in the examples
    y, f_vjp = jax.vjp(_layer, W, x, saveable_args=(False, True))
    with residual_client.connect("memory://") as client:
        yield {
            "np": np,
            "jax": jax,
            "jnp": jnp,
            "tree_structure": jax.tree.structure,
            "Bundle": Bundle,
            "Settings": Settings,
            "open_store": open_store,
            "client": client,
            "layer": _layer,
            "W": W,
            "x": x,
            "y": y,
            "y_bar": jnp.ones_like(y),
            "f_vjp": f_vjp,
            "handle": client.offload(f_vjp),
        }


@pytest.mark.parametrize("example", _examples(), ids=lambda example: example.name)
def test_an_example_in_a_docstring_is_true(example: doctest.DocTest, names: dict[str, Any]) -> None:
    """It prints what it says; where it reads a bundle that it does not store, that bundle is there."""
    source = "".join(step.source for step in example.examples)
    if _KEY in source and "client.offload" not in source:
        names["client"].offload(names["f_vjp"], _KEY)
    example.globs = {**names, **example.globs}
    output: list[str] = []
    doctest.DocTestRunner(verbose=False).run(example, out=output.append)
    assert not output, "".join(output)
