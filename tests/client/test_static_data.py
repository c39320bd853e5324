"""Static data of nodes of custom types: what says which child is which is a part of the tree."""

from __future__ import annotations

import dataclasses
import enum
import functools
import os
import re
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
    """An object whose text is its address, and which keeps what it has computed."""

    def __init__(self, name: object, hash_size: int = 0) -> None:
        self.name, self.hash_size = name, hash_size
        self._hash = id(self)

    @functools.cached_property
    def length(self) -> int:
        return len(str(self.name))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Plain) and (self.name, self.hash_size) == (other.name, other.hash_size)

    def __hash__(self) -> int:
        return hash(self.name)


class Slotted:
    """The same without a dictionary."""

    __slots__ = ("name",)

    def __init__(self, name: object) -> None:
        self.name = name


class Layout(dict[str, int]):
    """A mapping with an attribute, which can be a key."""

    def __init__(self, name: str) -> None:
        super().__init__(rank=1)
        self.name = name

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Layout) and self.name == other.name

    def __hash__(self) -> int:  # type: ignore[override]
        return hash(self.name)


class Flag(enum.IntFlag, boundary=enum.KEEP):
    """Flags that may have no name."""

    ONE = 1


@dataclasses.dataclass(frozen=True, eq=False)
class Lazy:
    """A value with a field that is set later."""

    name: str
    later: int = dataclasses.field(init=False)


def _returning(value: int) -> Callable[[], int]:
    return lambda: value


def _nested(name: str) -> Plain:
    return functools.reduce(lambda inner, _: Plain(inner), range(40), Plain(name))


def _unset(name: str) -> Lazy:
    return Lazy(name)


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
    "patterns": (re.compile("z"), re.compile("a")),
    "flags of no name": (Flag(0), Flag(8)),
    "generic types": (list[int], list[str]),
    "functions of one name": (np.sin, jnp.sin),
    "lambdas": (lambda: 1, lambda: 2),
    "functions that refer to another value": (_returning(1), _returning(2)),
    "wrapped functions": (functools.lru_cache(abs), functools.lru_cache(max)),
    "mappings with attributes": (Layout("z"), Layout("a")),
    "dataclasses without a value": (_unset("z"), _unset("a")),
    "attributes that speak of a hash": (Plain("z", hash_size=1), Plain("z", hash_size=2)),
    "deep objects": (_nested("z"), _nested("a")),
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


def _cyclic() -> Slotted:
    first = Slotted("a")
    first.name = [first]
    return first


def _endless() -> list[Any]:
    endless: list[Any] = []
    endless.append(endless)
    return endless


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (threading.Lock, "<lock>"),
        (Stubborn, "<Stubborn>"),
        (_cyclic, None),
        (_endless, "list(<list>)"),
        (lambda: np.arange(2, dtype=np.int8), None),
    ],
)
def test_whatever_static_data_are_they_have_a_text(make: Callable[[], object], text: str | None) -> None:
    """What cannot be taken apart is written by its type, an object within itself too, and the same data give the same text."""
    assert static_text(make()) == static_text(make())
    assert text is None or static_text(make()) == text


def test_what_an_object_has_computed_does_not_count(client: rc.Client) -> None:
    """The same object is the same after it was used, also where its text would be another one."""
    label = Plain("z")
    tree = Labelled({label: ramp()})
    handle = client.offload(
        jax.vjp(lambda p: jnp.sum(jnp.sin(p.arrays[label])), tree, saveable_args=False)[1]
    )
    assert (label.length, hash(label)) == (1, hash("z"))
    assert np.array_equal(client.restore(handle, args=(tree,))(1.0)[0].arrays[label], jnp.cos(ramp()))


@pytest.mark.parametrize(
    "make", [lambda: jax.nn.relu, lambda: functools.partial(jax.nn.gelu, approximate=False)]
)
def test_a_function_stays_itself_when_it_is_used(make: Callable[[], Any]) -> None:
    """What JAX notes at a function when it calls it is no part of the static data, and one in a module is its name."""
    function = make()
    before = static_text(function)
    jax.jit(function)(ramp())
    assert static_text(function) == before
    assert "functions." in before


def test_keys_of_one_shape_are_told_apart() -> None:
    """Arrays in static data are written with all their bytes, and random keys too."""
    texts = {static_text([Plain(jax.random.key(seed)), Plain(jnp.arange(3) + seed)]) for seed in range(3)}
    assert len(texts) == 3


def test_what_no_text_can_say_is_compared_in_this_process(client: rc.Client) -> None:
    """Two locks are two labels, in the arguments and in the args_res of a VJP object."""
    one, other = threading.Lock(), threading.Lock()
    right, wrong = Labelled({one: ramp(), other: ramp()}), Labelled({other: ramp(), one: ramp()})

    def product(tree: Labelled) -> Any:
        return jnp.sum(tree.arrays[one] * jnp.sin(tree.arrays[other]))

    vjp: Any = jax.vjp(product, right, saveable_args=False)[1]
    handle = client.offload(vjp)
    assert client.restore(handle, args=(right,))(1.0)
    with pytest.raises(ArgumentMismatch, match=r"args\[0\] has static data that are not equal"):
        client.restore(handle, args=(wrong,))
    with pytest.raises(ArgumentMismatch, match="not equal"):
        client.offload(vjp, args=(wrong,))
    vjp.args_res = [wrong]
    with pytest.raises(ArgumentMismatch, match=r"args\[0\] has static data that are not equal"):
        client.offload(vjp)


def test_fields_that_do_not_count_do_not_count() -> None:
    """A dataclass is what its fields of comparison say."""
    assert static_text(Point(1, note="a")) == static_text(Point(1, note="b"))
