"""The examples in docstrings do what they say."""

from __future__ import annotations

import doctest
import importlib
import pkgutil
from types import ModuleType

import numpy as np
import pytest

import residual_server
import residual_store

_MODULES = [
    module.name
    for package in (residual_store, residual_server)
    for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}.")
] + ["residual_store", "residual_server"]


def _examples(module: ModuleType) -> list[doctest.DocTest]:
    return [test for test in doctest.DocTestFinder(exclude_empty=True).find(module) if test.examples]


@pytest.mark.parametrize("name", _MODULES)
def test_examples_are_right(name: str) -> None:
    """Each example gives what stands below it."""
    module = importlib.import_module(name)
    for test in _examples(module):
        test.globs |= {"np": np}
        runner = doctest.DocTestRunner(verbose=False)
        runner.run(test)
        assert runner.failures == 0, test.name
        assert runner.tries > 0


def test_there_are_examples() -> None:
    """The public names that one starts with have examples."""
    assert sum(len(_examples(importlib.import_module(name))) for name in _MODULES) > 20
