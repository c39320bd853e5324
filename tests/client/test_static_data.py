"""Static data of nodes of custom types: what says which child is which is a part of the tree."""

from __future__ import annotations

import dataclasses
import functools
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from decimal import Decimal
from fractions import Fraction
from pathlib import Path, PurePath
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import residual_client as rc
from residual_client.static_data import static_text
from residual_store.errors import ArgumentMismatch, CotangentMismatch, ProgramMismatch
from tests.cases.case import ramp
from tests.cases.trees import Labelled, Side


class Name(str):
    """A text of another type."""

    __slots__ = ()


@dataclasses.dataclass(frozen=True)
class Point:
    """A value with a field that does not count."""

    at: object
    note: str = dataclasses.field(default="", compare=False)


class Pair(NamedTuple):
    one: object
    other: object


class Plain:
    """An object whose text is its address."""

    def __init__(self, name: object) -> None:
        self.name = name
        self._hash = id(self)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Plain) and self.name == other.name

    def __hash__(self) -> int:
        return hash(self.name)


class Slotted:
    """The same without a dictionary."""

    __slots__ = ("name",)

    def __init__(self, name: object) -> None:
        self.name = name


LABELS: dict[str, tuple[Any, Any]] = {
    "members of an enumeration": (Side.RIGHT, Side.LEFT),
    "numpy integers": (np.int64(1), np.int64(2)),
    "numpy floats of one text": (np.float32(0.1), np.float64(0.1)),
    "zeros": (np.float32(0.0), np.float32(-0.0)),
    "numpy texts": (np.str_("z"), np.str_("a")),
    "texts of another type": (Name("z"), Name("a")),
    "dataclasses": (Point("z"), Point("a")),
    "dataclasses in dataclasses": (Point(Point("z")), Point(Point("a"))),
    "named tuples": (Pair(1, 2), Pair(2, 1)),
    "plain objects": (Plain("z"), Plain("a")),
    "objects with slots": (Slotted("z"), Slotted("a")),
    "plain objects of several parts": (Plain((Plain(1), frozenset({2}))), Plain((Plain(1), frozenset({3})))),
    "paths": (PurePath("z"), PurePath("a")),
    "sets": (frozenset("ab"), frozenset("ac")),
    "types": (int, str),
    "scalar types": (jnp.float32, jnp.int32),
    "dtypes": (np.dtype("f4"), np.dtype("i4")),
    "functions": (jnp.sin, jnp.cos),
    "partial functions": (functools.partial(jnp.sum, axis=0), functools.partial(jnp.sum, axis=1)),
    "methods": (Plain("z").__eq__, Plain("a").__eq__),
    "fractions": (Fraction(1, 2), Fraction(1, 3)),
    "decimals": (Decimal("1.0"), Decimal("1.00")),
    "slices": (slice(0, 1), slice(1, 2)),
    "ranges": (range(1), range(2)),
    "treedefs": (jax.tree.structure([0, 0]), jax.tree.structure((0, 0))),
}


@pytest.mark.parametrize("kind", LABELS)
def test_children_in_another_order_are_another_tree(client: rc.Client, kind: str) -> None:
    """Nobody takes the one array for the other: not as an argument, not with ``like``, and not as a cotangent."""
    one, other = LABELS[kind]
    right = Labelled({one: ramp(), other: ramp() * 10})
    wrong = Labelled({other: ramp() * 10, one: ramp()})

    def product(tree: Labelled) -> Any:
        return jnp.sum(tree.arrays[one] * jnp.sin(tree.arrays[other]))

    handle = client.offload(jax.vjp(product, right, saveable_args=False)[1], "run/in")
    client.offload(jax.vjp(lambda x: Labelled({one: x, other: x * 2}), ramp())[1], "run/out")
    client.flush()
    wanted = jax.vjp(product, right)[1](1.0)[0].arrays[one]
    assert np.array_equal(client.restore(handle, args=(right,))(1.0)[0].arrays[one], wanted)
    with pytest.raises(ArgumentMismatch, match=r"args\[0\] was a Labelled with .* and is a Labelled with "):
        client.restore(handle, args=(wrong,))
    with pytest.raises(ArgumentMismatch, match=r"args\[0\] was a Labelled"):
        client.backward("run/in")(1.0, args=(wrong,))
    with pytest.raises(ProgramMismatch, match=r"args\[0\] was a Labelled"):
        client.restore("run/in", like=jax.vjp(product, wrong, saveable_args=False)[1], args=(wrong,))
    with pytest.raises(CotangentMismatch, match="cotangent was a Labelled"):
        client.backward("run/out")(wrong)


_ELSEWHERE = "from tests.client import test_static_data as here; print(here.all_texts())"


def all_texts() -> str:
    """The texts of all labels."""
    return " ".join(static_text(labels) for labels in LABELS.values())


@pytest.mark.parametrize("seed", ["0", "1"])
def test_static_data_have_one_text_in_every_process(seed: str) -> None:
    """It has no address and no hash in it, and no order that differs between processes."""
    done = subprocess.run(
        [sys.executable, "-c", _ELSEWHERE],
        cwd=Path(__file__).parents[2],
        env=os.environ | {"PYTHONHASHSEED": seed},
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert done.stdout.strip() == all_texts()


class Stubborn:
    """An object that refuses whatever it is asked."""

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError(name)

    def __call__(self) -> None:
        raise RuntimeError

    def __reduce_ex__(self, protocol: object) -> Any:
        raise RuntimeError


def _cyclic() -> Plain:
    first = Plain("a")
    first.name = [first]
    return first


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (threading.Lock, "<lock>"),
        (Stubborn, "<Stubborn>"),
        (_cyclic, "Plain(<__newobj__>, tuple(<Plain>), dict(tuple('name', list(<Plain>))))"),
        (lambda: Plain(b"a"), "Plain(<__newobj__>, tuple(<Plain>), dict(tuple('name', b'a')))"),
        (lambda: np.arange(2, dtype=np.int8), None),
    ],
)
def test_whatever_static_data_are_they_have_a_text(make: Callable[[], object], text: str | None) -> None:
    """What cannot be taken apart is written by its type, an object within itself too, and the same data give the same text."""
    assert static_text(make()) == static_text(make())
    assert text is None or static_text(make()) == text


def test_fields_that_do_not_count_do_not_count() -> None:
    """A dataclass is what its fields of comparison say."""
    assert static_text(Point(1, note="a")) == static_text(Point(1, note="b"))
