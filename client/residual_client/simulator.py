"""A simulator: a black box on the host and its adjoint, started side by side on an executor.

Nothing here is traced and nothing calls JAX's devices, because all of it runs inside host callbacks.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import secrets
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import CancelledError, Executor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
from jax.tree_util import keystr, tree_flatten, tree_leaves, tree_leaves_with_path, tree_map

from residual_client.jax_compat import TreeDef
from residual_client.pending import Pending, PendingAdjoints
from residual_store.errors import InvalidOption

__all__ = [
    "Ask",
    "Simulator",
    "aval_of",
    "check_floating",
    "check_real",
    "check_wide",
    "is_floating",
    "matching_leaves",
    "name_of",
]

type Host = npt.NDArray[np.generic]
type Ask = Callable[[Any, Any], Pending]

_KEY_BYTES = 16


def is_floating(leaf: Any) -> bool:
    """Whether a leaf has a gradient: it is an array of real floating-point numbers."""
    return bool(jnp.issubdtype(leaf.dtype, np.floating))


def name_of(function: object) -> str:
    """The name of a function, for messages."""
    return getattr(function, "__qualname__", None) or type(function).__qualname__


def aval_of(leaf: Any) -> jax.ShapeDtypeStruct:
    """Shape and dtype of a leaf."""
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)


def check_floating(tree: Any, what: str) -> None:
    """Raise `InvalidOption`, which names the leaf, unless all are floating point."""
    for path, leaf in tree_leaves_with_path(tree):
        if not is_floating(leaf):
            raise InvalidOption(
                f"{what}{keystr(path)} is {leaf.dtype} and has no gradient; "
                "only real floating-point arrays have one, a complex one as two of them"
            )


def check_real(tree: Any, what: str) -> None:
    """Raise `InvalidOption`, which names the leaf, for a complex one, whose gradient would be left out."""
    for path, leaf in tree_leaves_with_path(tree):
        if jnp.issubdtype(leaf.dtype, np.complexfloating):
            check_floating(leaf, what + keystr(path))


def check_wide(gradient: Sequence[Host], x: Any, what: str) -> None:
    """Raise ValueError for 64-bit leaves whose gradient has less: the process that computed it has cut it."""
    for host, (path, leaf) in zip(gradient, tree_leaves_with_path(x), strict=False):
        if is_floating(leaf) and is_floating(host) and host.itemsize < leaf.itemsize == 8:
            raise ValueError(
                f"{what}{keystr(path)} is {host.dtype} and should be {leaf.dtype}; switch jax_enable_x64 on where the "
                "adjoint runs, or give the gradient as float64"
            )


class Simulator:
    """``f`` on ``executor``, its adjoints through ``ask``, and those that no backward has come for in ``pending``.

    ``result_shape_dtypes`` is that of `jax.pure_callback`, or a function of ``x`` that gives it; ``timeout`` is in seconds.
    Every input is a copy that cannot be written to, because it outlives the callback and is shared.
    """

    def __init__(
        self,
        f: Callable[[Any], Any],
        ask: Ask,
        *,
        executor: Executor,
        result_shape_dtypes: Any,
        pending: PendingAdjoints,
        timeout: float | None,
    ) -> None:
        self._f = f
        self._executor = executor
        self._ask = ask
        self._result_shape_dtypes = result_shape_dtypes
        self.name = name_of(f)
        self.pending = pending
        self._timeout = timeout

    def output_of(self, x: Any) -> Any:
        """Shapes and dtypes of ``f(x)``; raises `InvalidOption` for what has no gradient."""
        given = self._result_shape_dtypes
        out = tree_map(aval_of, given(x) if callable(given) else given)
        check_floating(out, f"the output of {self.name}")
        return out

    def value(self, x: Any) -> Any:
        """``f(x)`` alone."""
        x = _snapshot(x)
        with self._started() as started:
            return self._output(self._start(x, started), x)

    def start(self, x: Any) -> tuple[Any, Host]:
        """``f(x)`` and the key of its adjoints, one for each element of the output, which have started too."""
        x = _snapshot(x)
        with self._started() as started:
            value = self._start(x, started)
            started.extend(self._ask(x, y_bar) for y_bar in _basis(self.output_of(x)))
            y = self._output(value, x)
        # Random, because a number could name the adjoints of another input in a table that is not the one it comes from.
        key = secrets.token_bytes(_KEY_BYTES)
        self.pending.add(key, started[1:])
        return y, np.frombuffer(key, np.uint32)

    def finish(self, key: Any, x: Any, y_bar: Any) -> list[Host]:
        """The gradient in the floating-point leaves of ``x``, from the adjoints of ``key`` if they are still there."""
        x, y_bar = _snapshot(x), _snapshot(y_bar)
        with contextlib.suppress(CancelledError), self.pending.used(np.asarray(key).tobytes()) as adjoints:
            # A sum would spread what is not finite over all inputs.
            if adjoints is not None and all(np.isfinite(leaf).all() for leaf in tree_leaves(y_bar)):
                return self._combined(adjoints, y_bar, x)
        with self._started() as started:
            started.append(self._ask(x, y_bar))
            return _like(self._gradient(started[0], x), x)

    def both(self, x: Any, y_bar: Any) -> tuple[Any, list[Host]]:
        """``f(x)`` and the gradient for one cotangent, side by side."""
        x, y_bar = _snapshot(x), _snapshot(y_bar)
        with self._started() as started:
            value = self._start(x, started)
            started.append(self._ask(x, y_bar))
            return self._output(value, x), _like(self._gradient(started[1], x), x)

    @contextlib.contextmanager
    def _started(self) -> Iterator[list[Pending]]:
        """What has started, and is cancelled if the rest fails."""
        started: list[Pending] = []
        try:
            yield started
        except BaseException:
            for one in started:
                one.cancel()
            raise

    def _start(self, x: Any, started: list[Pending]) -> Pending:
        started.append(self._executor.submit(self._f, x))
        return started[-1]

    def _combined(self, adjoints: Sequence[Pending], y_bar: Any, x: Any) -> list[Host]:
        """The sum of the adjoints; one whose weight is zero is not waited for."""
        weights = [weight for leaf in tree_leaves(y_bar) for weight in leaf.reshape(-1)]
        total: list[Any] = [np.zeros(leaf.shape, leaf.dtype) for leaf in _floating(x)]
        for weight, adjoint in zip(weights, adjoints, strict=True):
            if weight != 0:
                parts = self._gradient(adjoint, x)
                total = [one + weight * part for one, part in zip(total, parts, strict=True)]
        return _like(total, x)

    def _output(self, value: Pending, x: Any) -> Any:
        out = self.output_of(x)
        where = f"the output of {self.name}"
        leaves = matching_leaves(self._result(value), out, where)
        wanted, treedef = _flat(out)
        return treedef.unflatten(
            [np.asarray(leaf, one.dtype) for leaf, one in zip(leaves, wanted, strict=True)]
        )

    def _gradient(self, adjoint: Pending, x: Any) -> list[Host]:
        return matching_leaves(self._result(adjoint), x, f"the gradient of {self.name}")

    def _result(self, pending: Pending) -> Any:
        try:
            return pending.result(self._timeout)
        except concurrent.futures.TimeoutError as error:
            if str(error):
                raise
            raise TimeoutError(
                f"{self.name} or its adjoint gave no result in {self._timeout} seconds"
            ) from error


def _flat(tree: Any) -> tuple[list[Any], TreeDef]:
    return tree_flatten(tree)


def _snapshot(x: Any) -> Any:
    def copied(leaf: Any) -> Host:
        host = np.array(leaf)
        host.flags.writeable = False
        return host

    return tree_map(copied, x)


def _basis(out: Any) -> Iterator[Any]:
    """The cotangents with a one in one place of one output, in the order of the outputs."""
    leaves, treedef = _flat(out)
    for index, leaf in enumerate(leaves):
        for place in np.ndindex(leaf.shape):
            arrays = [np.zeros(one.shape, one.dtype) for one in leaves]
            arrays[index][place] = 1
            yield _snapshot(treedef.unflatten(arrays))


def _floating(x: Any) -> list[Any]:
    return [leaf for leaf in tree_leaves(x) if is_floating(leaf)]


def _like(gradient: Iterable[Host], x: Any) -> list[Host]:
    return [np.asarray(one, leaf.dtype) for one, leaf in zip(gradient, _floating(x), strict=True)]


def matching_leaves(given: Any, wanted: Any, what: str) -> list[Host]:
    """The leaves of a result where those of ``wanted`` are floating point; raises ValueError, which names the leaf."""
    try:
        values = _flat(wanted)[1].flatten_up_to(given)
    except ValueError as error:
        raise ValueError(f"{what} is another tree than it should be: {error}") from error
    found = []
    for value, (path, leaf) in zip(values, tree_leaves_with_path(wanted), strict=True):
        if is_floating(leaf):
            host = np.asarray(value)
            if host.shape != leaf.shape or not (is_floating(host) or host.dtype.kind in "iu"):
                raise ValueError(
                    f"{what}{keystr(path)} is {host.dtype}{list(host.shape)} and should be {leaf.dtype}{list(leaf.shape)}"
                )
            found.append(host)
    return found
