"""Trees of arguments and outputs: containers, keys, custom types, and one array in several places."""

from __future__ import annotations

import dataclasses
import enum
from collections import OrderedDict, defaultdict
from pathlib import PurePath
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import tree_leaves

from tests.cases.case import Case, matrix, ramp, registered


def _sum_of_squares(tree: Any) -> Any:
    return sum(jnp.sum(x * x * (index + 1)) for index, x in enumerate(tree_leaves(tree)))


def _under(keys: Any) -> dict[Any, Any]:
    return {key: ramp() * (index + 1) for index, key in enumerate(keys)}


@registered
def tree_odd_dict_keys() -> Case:
    composed, decomposed = "é", "é"
    keys = ["a/b", "..", "", "a\x00b", composed, decomposed, "a.b", "%2e%2e", "con", ".__lock", "k" * 300]
    return Case(fn=_sum_of_squares, args=(_under(keys),))


@registered
def tree_lone_surrogate_key() -> Case:
    return Case(fn=_sum_of_squares, args=(_under(["a", "\udc80", "b"]),), saveable_args=False)


@registered
def tree_int_dict_keys() -> Case:
    return Case(fn=_sum_of_squares, args=(_under([10, 2, -1, 2**62]),), saveable_args=False)


@registered
def tree_huge_int_dict_keys() -> Case:
    return Case(fn=_sum_of_squares, args=(_under([2, 2**70]),), saveable_args=False)


@registered
def tree_keys_of_other_types() -> Case:
    args = (_under([1.5, -0.25]), _under([b"\x00b", b"a"]), _under([True, False]))
    return Case(fn=lambda *trees: _sum_of_squares(trees), args=args, saveable_args=False)


@registered
def tree_tuple_dict_keys() -> Case:
    return Case(fn=_sum_of_squares, args=(_under([("dense", "kernel"), ("dense", "bias"), ("head", 0)]),))


@registered
def tree_none_and_empty_containers() -> Case:
    tree: Any = {"w": ramp(), "b": None, "c": [None, ramp() * 2, (), {}, []]}
    return Case(
        fn=lambda p: jnp.sum(p["w"] * p["c"][1]),
        args=(tree,),
        saveable_args=({"b": True, "c": (True, False, True, True, True), "w": False},),
        leaves=0,
        since=(0, 12),
        why="jax before 0.12 refuses flags in a dict for an argument that is a dict",
    )


@registered
def tree_none_argument() -> Case:
    return Case(fn=lambda a, nothing, b: jnp.sin(a) * b * (nothing is None), args=(ramp(), None, ramp() * 2))


@registered
def tree_empty_argument() -> Case:
    return Case(fn=lambda a, empty: jnp.sin(a) * a + len(empty), args=(ramp(), {}))


class Pair(NamedTuple):
    """A container that JAX knows, and that turns into a plain tuple in a VJP object."""

    w: Any
    b: Any


@registered
def tree_namedtuple() -> Case:
    return Case(
        fn=lambda p: jnp.sum(p.w * jnp.sin(p.b) * p.b),
        args=(Pair(ramp(), ramp() * 2),),
        saveable_args=(Pair(False, True),),
    )


@registered
def tree_namedtuple_output() -> Case:
    return Case(fn=lambda x: Pair(jnp.sin(x), {"deep": Pair(x * x, x)}), args=(ramp(),))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Linear:
    """A module: arrays and a static field, callable."""

    w: Any
    b: Any
    activation: str = dataclasses.field(default="tanh", metadata={"static": True})

    def __call__(self, x: Any) -> Any:
        return getattr(jnp, self.activation)(x @ self.w + self.b)


@registered
def tree_bound_method_fn() -> Case:
    return Case(fn=Linear(matrix(), ramp()).__call__, args=(ramp(),))


@registered
def tree_module_with_static_field() -> Case:
    module = Linear(matrix(), ramp(), "sin")
    return Case(fn=lambda m, x: m(x), args=(module, ramp()), saveable_args=(False, True))


@jax.tree_util.register_pytree_node_class
class Checked:
    """A module whose constructor takes nothing but arrays."""

    def __init__(self, w: Any) -> None:
        if not hasattr(w, "shape"):
            raise TypeError("w must be an array")
        self.w = w

    def tree_flatten(self) -> tuple[Any, Any]:
        return (self.w,), None

    @classmethod
    def tree_unflatten(cls, _: Any, children: Any) -> Checked:
        made = object.__new__(cls)
        made.w = children[0]
        return made


@registered
def tree_class_with_its_own_flattening() -> Case:
    return Case(
        fn=lambda m, x: jnp.tanh(x @ m.w), args=(Checked(matrix()), ramp()), saveable_args=(False, True)
    )


class Side(enum.Enum):
    """A key that only its class can express."""

    LEFT = "left"
    RIGHT = "right"


@jax.tree_util.register_pytree_node_class
class Labelled:
    """Arrays by labels of any kind, in the order of insertion; the labels are static data."""

    def __init__(self, arrays: dict[Any, Any]) -> None:
        self.arrays = arrays

    def tree_flatten(self) -> tuple[Any, Any]:
        return tuple(self.arrays.values()), tuple(self.arrays)

    @classmethod
    def tree_unflatten(cls, labels: Any, children: Any) -> Labelled:
        return cls(dict(zip(labels, children, strict=True)))


@registered
def tree_labels_of_any_kind() -> Case:
    labels = [Side.RIGHT, Side.LEFT, np.int32(2), PurePath("b"), slice(1), jnp.float32, frozenset("a")]
    return Case(fn=lambda p: _sum_of_squares(p), args=(Labelled(_under(labels)),), saveable_args=False)


@registered
def tree_partial_argument() -> Case:
    apply = jax.tree_util.Partial(lambda w, x: jnp.tanh(x @ w), matrix())
    return Case(fn=lambda apply, x: apply(x), args=(apply, ramp()), saveable_args=(False, True))


@registered
def tree_ordereddict() -> Case:
    return Case(
        fn=lambda p: jnp.sum(p["z"] * p["a"] * jnp.arange(1.0, 5.0)),
        args=(OrderedDict([("z", ramp()), ("a", ramp() * 2)]),),
        saveable_args=False,
        leaves=1,
    )


@registered
def tree_defaultdict() -> Case:
    tree: Any = defaultdict(list, {"z": [ramp(), ramp() * 3], "a": ramp() * 2})
    return Case(fn=lambda p: _sum_of_squares(p), args=(tree,), saveable_args=False)


@registered
def tree_deeply_nested() -> Case:
    tree: Any = ramp()
    for level in range(60):
        tree = {"n": tree} if level % 2 else [tree]
    return Case(
        fn=lambda p: jnp.sum(jnp.sin(tree_leaves(p)[0]) * tree_leaves(p)[0]),
        args=(tree,),
        saveable_args=False,
    )


@registered
def tree_tied_weights() -> Case:
    w = matrix()
    return Case(
        fn=lambda p, x: jnp.tanh(jnp.sin(x @ p["embed"]) @ p["head"].T),
        args=({"embed": w, "head": w}, ramp()),
        saveable_args=(False, True),
    )


def _tied(flags: tuple[bool, bool]) -> Case:
    w = matrix()
    return Case(
        fn=lambda p, x: jnp.tanh(jnp.sin(x @ p["a"]) @ p["tied"]),
        args=({"a": w, "tied": w}, ramp()),
        saveable_args=(flags, True),
    )


@registered
def tree_tied_mixed_flags() -> Case:
    return _tied((False, True))


@registered
def tree_tied_mixed_flags_the_other_way() -> Case:
    return _tied((True, False))


@registered
def tree_same_array_two_args() -> Case:
    x = ramp()
    return Case(fn=lambda a, b: jnp.sum(a * b), args=(x, x), saveable_args=(True, False))


@registered
def tree_equal_content_distinct_leaves() -> Case:
    args = (jnp.full(8, 0.5), jnp.full(8, 0.5), jnp.full((2, 4), 0.5).reshape(8))
    return Case(fn=lambda a, b, c: jnp.sum(a * b * c), args=args)


@registered
def tree_same_bytes_other_dtype_shape() -> Case:
    floats = jnp.arange(1.0, 9.0).reshape(2, 4)
    integers = jax.lax.bitcast_convert_type(floats, jnp.int32).reshape(8)

    @jax.checkpoint
    def product(a: Any, i: Any, b: Any) -> Any:
        return jnp.sum(a @ b) * jnp.sum(a * a) + jnp.sum(jnp.sin(b)) * jnp.sum(i % 7).astype(jnp.float32)

    return Case(fn=product, args=(floats, integers, floats.reshape(4, 2)))
