"""The error tree: one class for each code, drawn as it is."""

from __future__ import annotations

import builtins
import inspect
import re

import pytest

from residual_store import errors
from residual_store.errors import ERRORS, ResidualStoreError

_CLASSES = [
    kind
    for kind in vars(errors).values()
    if inspect.isclass(kind) and issubclass(kind, ResidualStoreError) and kind is not ResidualStoreError
]


def test_the_drawing_is_the_tree() -> None:
    """Each class of the module stands in the drawing with its code and status, and no other does."""
    text = errors.__doc__ or ""
    drawn = dict(re.findall(r"[├└]── (\w+)\s+(.*)", text))
    assert set(drawn) == {kind.__name__ for kind in _CLASSES}
    for code, kind in ERRORS.items():
        status = "--" if kind.status is None else str(kind.status)
        assert drawn[kind.__name__].split() == [status, code]


def test_codes_are_unique() -> None:
    """A code names one class, and every class that is raised has one."""
    assert len({kind.code for kind in ERRORS.values()}) == len(ERRORS) >= 25
    leaves = [kind for kind in _CLASSES if not kind.__subclasses__()]
    assert {kind.code for kind in leaves} <= set(ERRORS)
    assert all(ERRORS[kind.code] is kind for kind in leaves)


@pytest.mark.parametrize("kind", _CLASSES, ids=lambda kind: kind.__name__)
def test_an_error_is_for_people_and_for_programs(kind: type[ResidualStoreError]) -> None:
    """Its text is its detail, its fields are a mapping, it has a docstring, and it hides no builtin error."""
    error = kind("what was refused and why", key="run/a")
    assert str(error) == error.detail == "what was refused and why"
    assert error.fields == {"key": "run/a"}
    assert inspect.getdoc(kind)
    assert not hasattr(builtins, kind.__name__)
