"""What a case is, and the table of all of them."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import tree_map

__all__ = ["CASES", "Case", "matrix", "numbered_cotangent", "ramp", "registered"]


@dataclass(frozen=True, kw_only=True)
class Case:
    """One function to differentiate: how `jax.vjp` is called on it, and what comes out.

    ``cotangent`` makes a cotangent out of the function's output where the numbered one will not do.
    With ``jit`` the VJP object is made inside of `jax.jit`.
    ``leaves`` is the number of leaves that the VJP object must have, None where it does not matter.
    ``on_some_devices`` says that its mesh leaves out devices of the process, so that nobody can guess it.
    ``export_fails`` is a part of what `jax.export` says when it cannot serialize the backward.
    ``since`` is the first JAX release that can do this, and ``why`` says what the ones before it cannot.
    """

    fn: Callable[..., Any]
    args: tuple[Any, ...]
    saveable_args: Any = True
    cotangent: Callable[[Any], Any] | None = None
    jit: bool = False
    has_aux: bool = False
    in_nzs: Any = None
    needs_devices: int = 1
    on_some_devices: bool = False
    x64: bool = False
    leaves: int | None = None
    export_fails: str = ""
    since: tuple[int, ...] = ()
    why: str = ""

    def context(self) -> contextlib.AbstractContextManager[Any]:
        """The JAX configuration in which all that belongs to the case must run."""
        return jax.enable_x64(True) if self.x64 else contextlib.nullcontext()

    def forward(self) -> tuple[Any, Any]:
        """The output and the VJP object."""
        return self._jitted(*self.args) if self.jit else self._vjp(*self.args)

    def direct(self) -> tuple[Any, Any]:
        """The same with nothing left out of what is saved: what a gradient is to be compared with."""
        make = jax.jit(self._vjp_saving_all) if self.jit else self._vjp_saving_all
        return make(*self.args)

    def like(self) -> Any:
        """A VJP object of the same function, abstract where the forward is jitted."""
        return jax.eval_shape(self._jitted, *self.args)[1] if self.jit else self._vjp(*self.args)[1]

    def cotangent_of(self, y: Any) -> Any:
        return (self.cotangent or numbered_cotangent)(y)

    def missing_on(self, version: str) -> str:
        """Why this release of JAX cannot make the VJP object at all; empty if it can."""
        release = tuple(int(part) for part in version.split(".")[: len(self.since)])
        return self.why if release < self.since else ""

    @functools.cached_property
    def _jitted(self) -> Callable[..., tuple[Any, Any]]:
        return jax.jit(self._vjp)

    def _vjp(self, *args: Any) -> tuple[Any, Any]:
        return self._make(args, self.saveable_args)

    def _vjp_saving_all(self, *args: Any) -> tuple[Any, Any]:
        return self._make(args, True)

    def _make(self, args: tuple[Any, ...], saveable_args: Any) -> tuple[Any, Any]:
        # Without has_aux there are two results, with it three.
        vjp: Any = jax.vjp
        made = vjp(self.fn, *args, has_aux=self.has_aux, saveable_args=saveable_args, in_nzs=self.in_nzs)
        return made[0], made[1]


CASES: dict[str, Callable[[], Case]] = {}
"""Every case by name; the first call makes it."""


def registered(make: Callable[[], Case]) -> Callable[[], Case]:
    """Put a case into the table under the name of its function."""
    assert make.__name__ not in CASES
    CASES[make.__name__] = functools.cache(make)
    return make


def numbered_cotangent(y: Any) -> Any:
    """A cotangent whose entries all differ, so that two leaves that were swapped show; float0 for what is not real."""
    count = 0

    def one(value: Any) -> Any:
        nonlocal count
        value = value if hasattr(value, "dtype") else jnp.asarray(value)
        if not jnp.issubdtype(value.dtype, jnp.inexact):
            return np.zeros(value.shape, jax.dtypes.float0)
        numbers: Any = (np.arange(count, count + value.size) % 11 - 4) * 0.25 + 0.125
        count += value.size
        if jnp.issubdtype(value.dtype, jnp.complexfloating):
            numbers = numbers * (1 - 0.5j)
        array = jnp.asarray(numbers.reshape(value.shape).astype(value.dtype))
        return jax.device_put(array, value.sharding) if getattr(value, "committed", False) else array

    return tree_map(one, y)


def ramp(n: int = 4) -> jax.Array:
    """0.3, 0.6, 0.9 and so on."""
    return jnp.asarray(np.arange(1, n + 1, dtype=np.float32) * np.float32(0.3))


def matrix(rows: int = 4, columns: int = 4, scale: float = 0.1) -> jax.Array:
    """Ascending numbers around zero."""
    numbers = np.arange(rows * columns, dtype=np.float32).reshape(rows, columns) - rows * columns / 2
    return jnp.asarray(numbers * np.float32(scale))
