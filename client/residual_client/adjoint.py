"""Eager adjoints: a black box on the host whose adjoints run beside it, so that value and gradient take the time of one.

The backward of ``y = f(x)`` is linear in the cotangent of ``y``.
So the adjoints of the basis of the outputs can start together with ``f``, before anything is known of what follows, and
the backward is a sum of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import tree_flatten, tree_leaves, tree_map

from residual_client.adjoint_requests import AdjointRequests, HasStore
from residual_client.dependence import cotangent_depends_on_primal
from residual_client.jax_compat import TreeDef
from residual_client.pending import PendingAdjoints
from residual_client.simulator import Ask, Simulator, aval_of, check_floating, check_real, is_floating
from residual_store.closing import ClosedAtExit
from residual_store.errors import InvalidOption

__all__ = ["EagerAdjoint", "eager_adjoint"]

_KEY = jax.ShapeDtypeStruct((4,), np.uint32)


def eager_adjoint(
    f: Callable[[Any], Any],
    adjoint: Callable[[Any, Any], Any] | None,
    *,
    result_shape_dtypes: Any,
    executor: Executor | None = None,
    max_outputs: int = 16,
    max_pending: int = 64,
    pending_seconds: float = 3600.0,
    timeout: float | None = None,
    client: HasStore | None = None,
    key: str | None = None,
) -> EagerAdjoint:
    """A black-box function on the host as a differentiable JAX function whose adjoints start together with it.

    ``f(x)`` takes one pytree of read-only numpy arrays and returns one of floating-point arrays, whose shapes and dtypes
    are ``result_shape_dtypes``, or that called with ``x``.
    ``adjoint(x, y_bar)`` returns the gradient for one cotangent, a pytree like ``x``, linear in ``y_bar``; a leaf that is not
    floating point needs none, such as None.
    Both must be functions of their arguments alone.

    A forward that is differentiated starts ``f(x)`` and one adjoint for each element of the output on ``executor``, by
    default threads of its own, and goes on when ``f(x)`` is there; the backward waits for the adjoints and adds them up.
    It works eagerly and inside `jax.jit`, `jax.lax.scan` and, one member after the other, `jax.vmap`.
    A call that is not differentiated starts no adjoint.

    ``max_outputs`` bounds the number of elements of the output, each of which costs one adjoint.
    Adjoints whose backward does not come are cancelled ``pending_seconds`` seconds later or after ``max_pending`` further
    forwards, at the next forward; a backward that comes later still runs ``adjoint`` itself.
    ``timeout`` is how many seconds to wait for one result, None for ever.
    With ``client`` and ``key``, adjoints run wherever `serve_adjoints` serves that key, and ``adjoint`` is None.

    Raises `InvalidOption` for outputs that are too many or not floating point, and for complex inputs where there is a gradient.
    What ``f`` and ``adjoint`` raise comes out of the computation as JAX reports errors of callbacks, with its message.

    >>> square = eager_adjoint(
    ...     lambda x: x * x, lambda x, y_bar: 2 * x * y_bar, result_shape_dtypes=jax.ShapeDtypeStruct((), "float32")
    ... )
    >>> y, x_bar = jax.jit(jax.value_and_grad(lambda x: square(x) ** 2))(3.0)
    >>> float(y), float(x_bar)
    (81.0, 108.0)
    """
    own = ThreadPoolExecutor(max_outputs + 1, "eager-adjoint") if executor is None else None
    runner = own or executor
    assert runner is not None
    if client is not None and key is not None and adjoint is None:
        ask: Ask = AdjointRequests(client.store, key, seconds=pending_seconds)
    elif client is None and key is None and adjoint is not None:
        ask = _submitting(runner, adjoint)
    else:
        raise InvalidOption(
            "eager_adjoint takes an adjoint, or client and key, and then None for the adjoint"
        )
    simulator = Simulator(
        f,
        ask,
        executor=runner,
        result_shape_dtypes=result_shape_dtypes,
        pending=PendingAdjoints(most=max_pending, seconds=pending_seconds),
        timeout=timeout,
    )
    return EagerAdjoint(simulator, max_outputs=max_outputs, own=own)


def _submitting(executor: Executor, adjoint: Callable[[Any, Any], Any]) -> Ask:
    def ask(x: Any, y_bar: Any) -> Future[Any]:
        try:
            return executor.submit(adjoint, x, y_bar)
        except RuntimeError:
            # It was shut down, and a backward that comes later is to be slow, not wrong.
            done: Future[Any] = Future()
            done.set_result(adjoint(x, y_bar))
            return done

    return ask


class EagerAdjoint(ClosedAtExit):
    """What `eager_adjoint` returns: a differentiable function of one pytree."""

    def __init__(self, simulator: Simulator, *, max_outputs: int, own: Executor | None) -> None:
        self._simulator = simulator
        self._max_outputs = max_outputs
        self._own = own
        self._differentiable = jax.custom_vjp(self._primal)
        self._differentiable.defvjp(self._forward, self._backward)

    def __call__(self, x: Any) -> Any:
        """``f(x)``."""
        return self._differentiable(tree_map(jnp.asarray, x))

    def __repr__(self) -> str:
        return f"EagerAdjoint({self._simulator.name})"

    @property
    def pending(self) -> int:
        """How many forwards have adjoints that no backward has come for yet."""
        return len(self._simulator.pending)

    @property
    def expired(self) -> int:
        """How many forwards had adjoints that no backward came for in time."""
        return self._simulator.pending.expired

    def close(self) -> None:
        """Cancel the adjoints that have not started, and release the threads if they are its own."""
        self._simulator.pending.clear()
        if self._own is not None:
            self._own.shutdown(wait=False, cancel_futures=True)

    def value_and_grad(self, g: Callable[[Any], Any]) -> Callable[[Any], tuple[Any, Any]]:
        """Like `jax.value_and_grad` of ``g(f(x))``, for a scalar function ``g`` of the output.

        Where the cotangent of the output does not depend on the output (see `cotangent_depends_on_primal`), ``f(x)`` runs
        beside one adjoint with that cotangent, however many outputs there are.
        Elsewhere it is ``jax.value_and_grad(lambda x: g(self(x)))``.

        >>> out = jax.ShapeDtypeStruct((1000,), "float32")
        >>> double = eager_adjoint(lambda x: 2 * x, lambda x, y_bar: 2 * y_bar, result_shape_dtypes=out)
        >>> total, x_bar = double.value_and_grad(jnp.sum)(jnp.ones(1000))
        >>> float(total), float(x_bar[0])
        (2000.0, 2.0)
        """
        # Not under jax.jit, which would keep what g captures and has changed since.
        cotangent_of = jax.grad(g)

        def value_and_grad(x: Any) -> tuple[Any, Any]:
            x = tree_map(jnp.asarray, x)
            out = self._simulator.output_of(x)
            if cotangent_depends_on_primal(g, out):
                value, x_bar = jax.value_and_grad(lambda x: g(self(x)))(x)
                return value, x_bar
            check_floating(x, "x")
            # Its residuals do not depend on the output, so any output will do.
            y_bar = cotangent_of(tree_map(lambda one: jnp.zeros(one.shape, one.dtype), out))
            treedef: TreeDef
            leaves, treedef = tree_flatten(x)
            y, found = jax.pure_callback(
                self._simulator.both, (out, [*map(aval_of, leaves)]), x, y_bar, vmap_method="sequential"
            )
            return g(y), treedef.unflatten(found)

        return value_and_grad

    def _primal(self, x: Any) -> Any:
        return jax.pure_callback(
            self._simulator.value, self._simulator.output_of(x), x, vmap_method="sequential"
        )

    def _forward(self, x: Any) -> Any:
        check_real(x, "x")
        out = self._simulator.output_of(x)
        count = sum(math.prod(leaf.shape) for leaf in tree_leaves(out))
        if count > self._max_outputs:
            raise InvalidOption(
                f"{self._simulator.name} has {count} output elements, so every forward would run {count} adjoints, and "
                f"max_outputs is {self._max_outputs}; reduce the output inside of it, use value_and_grad where the "
                "cotangent does not depend on the output, or a plain jax.custom_vjp that runs one adjoint in its backward"
            )
        y, key = jax.pure_callback(self._simulator.start, (out, _KEY), x, vmap_method="sequential")
        # x stays, because the adjoints may have expired when the backward comes.
        return y, (key, x)

    def _backward(self, residuals: Any, y_bar: Any) -> Any:
        key, x = residuals
        treedef: TreeDef
        leaves, treedef = tree_flatten(x)
        avals = [aval_of(leaf) for leaf in leaves if is_floating(leaf)]
        found = iter(
            jax.pure_callback(self._simulator.finish, avals, key, x, y_bar, vmap_method="sequential")
        )
        return (
            treedef.unflatten([next(found) if is_floating(leaf) else _no_tangent(leaf) for leaf in leaves]),
        )


def _no_tangent(leaf: Any) -> Any:
    return np.zeros(np.shape(leaf), jax.dtypes.float0)
