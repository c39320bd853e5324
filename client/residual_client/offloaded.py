"""`offloaded`: a function whose residuals wait in a store from its forward to its backward, inside of a compiled step."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain, compress
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun
from jax.tree_util import tree_flatten, tree_leaves, tree_map, tree_structure

from residual_client.depot import Depot, Fetch, Place, Stow
from residual_client.host_call import host_call
from residual_client.jax_compat import TreeDef, children_of, linearized
from residual_client.passage import Passage
from residual_client.vjp import residuals_of

__all__ = ["differentiable", "positions_of"]


def differentiable(
    fun: Callable[..., Any],
    depot: Depot,
    *,
    saveable_args: Any,
    static_argnums: Sequence[int],
    longest_path: int,
) -> Callable[..., Any]:
    """``fun`` with its residuals in ``depot`` between forward and backward; see `residual_client.Client.offloaded`."""

    @functools.wraps(fun)
    def apply(*args: Any, **kwargs: Any) -> Any:
        static = positions_of(static_argnums, len(args))
        dynamic = [position for position in range(len(args)) if position not in static]

        def whole(primals: Any, kwargs: Any) -> Any:
            given = dict(enumerate(args)) | dict(zip(dynamic, primals, strict=True))
            return fun(*given.values(), **kwargs)

        flags = _per_argument(saveable_args, args)
        primals = tuple(args[position] for position in dynamic)
        traced, shape = jax.make_jaxpr(whole, return_shape=True)(primals, kwargs)
        captured = list(traced.consts)
        saveable = [
            *chain.from_iterable(
                _flags(flags[position], tree_structure(args[position])) for position in dynamic
            ),
            *[saveable_args is not False] * len(tree_leaves(kwargs)),
            *[False] * len(captured),
        ]
        # A value that JAX differentiates is always a tracer.
        moving = tree_map(lambda leaf: isinstance(leaf, jax.core.Tracer), (*primals, kwargs, captured))
        call = _Call(fun, traced.jaxpr, tree_structure(shape), saveable, moving, depot, longest_path)
        function = jax.custom_vjp(call.primal)
        function.defvjp(call.forward, call.backward)
        return function(primals, kwargs, captured)

    return apply


def positions_of(argnums: Sequence[int], count: int) -> list[int]:
    """Positions from 0 on, for numbers that may count from the end; raises ValueError.

    >>> positions_of((0, -1), 3)
    [0, 2]
    """
    if not all(-count <= number < count for number in argnums):
        raise ValueError(
            f"argnums is {tuple(argnums)} and the function was called with {count} positional arguments"
        )
    positions = [number % count for number in argnums]
    if len(set(positions)) != len(positions):
        raise ValueError(f"argnums is {tuple(argnums)}, which names one argument twice")
    return positions


def _per_argument(saveable: Any, args: Sequence[Any]) -> Sequence[Any]:
    if isinstance(saveable, bool):
        return [saveable] * len(args)
    if len(saveable) != len(args):
        raise TypeError(f"saveable_args has {len(saveable)} entries for {len(args)} positional arguments")
    entries: Sequence[Any] = saveable
    return entries


def _flags(saveable: Any, tree: TreeDef) -> list[bool]:
    """One flag per leaf from what `jax.vjp` takes as ``saveable_args``: a bool, or a container of as many as there are children."""
    if isinstance(saveable, bool):
        return [saveable] * tree.num_leaves
    entries, children = tree_leaves(saveable, is_leaf=lambda one: one is not saveable), children_of(tree)
    if len(entries) != len(children):
        raise TypeError(
            f"saveable_args has {saveable!r} where the arguments have {tree}; give a bool or one entry each"
        )
    return list(chain.from_iterable(map(_flags, entries, children)))


@dataclass(frozen=True)
class _Plan:
    """What a forward saves.

    ``program`` maps the operands to the outputs and the leaves of the VJP object, which has the structure ``vjp``.
    Each leaf is an operand, by index in ``carried``, or one of the ``stored`` arrays.
    """

    program: ClosedJaxpr
    vjp: TreeDef
    leaves: list[tuple[bool, int]]
    carried: list[int]
    stored: list[int]
    passages: tuple[Passage, ...]
    places: tuple[Place, ...]


class _Call:
    """One call of a function, traced for the shapes of its arguments."""

    def __init__(
        self,
        fun: Any,
        jaxpr: Any,
        out_tree: TreeDef,
        saveable: Sequence[bool],
        moving: Any,
        depot: Depot,
        longest_path: int,
    ) -> None:
        self._function = getattr(fun, "__qualname__", repr(fun))
        self._jaxpr = jaxpr
        self._out_tree = out_tree
        self._saveable = saveable
        self._moving = moving
        self._depot = depot
        self._longest_path = longest_path
        self._known: _Plan | None = None

    def primal(self, args: Any, kwargs: Any, captured: Any) -> Any:
        """The function itself, which stores nothing."""
        outputs = jaxpr_as_fun(ClosedJaxpr(self._jaxpr, captured))(*tree_leaves((args, kwargs)))
        return self._out_tree.unflatten(outputs)

    def forward(self, args: Any, kwargs: Any, captured: Any) -> tuple[Any, Any]:
        """The outputs, and what the backward needs: a ticket for what is stored, and the operands that it reads again."""
        plan = self._plan(args, kwargs, captured)
        operands = tree_leaves((args, kwargs, captured))
        results = jaxpr_as_fun(plan.program)(*operands)
        outputs, saved = results[: self._out_tree.num_leaves], results[self._out_tree.num_leaves :]
        carried = [operands[index] for index in plan.carried]
        if not plan.stored:
            return self._out_tree.unflatten(outputs), (None, carried)
        stow = Stow(self._depot, plan.places, self._function)
        (ticket,) = host_call(
            stow, *[one.out(saved[index]) for one, index in zip(plan.passages, plan.stored, strict=True)]
        )
        outputs, ticket = _tied(outputs, _varying(ticket))
        return self._out_tree.unflatten(outputs), (ticket, carried)

    def backward(self, residuals: Any, cotangent: Any) -> tuple[Any, ...]:
        """The gradients of the operands."""
        plan, (ticket, carried) = self._known, residuals
        assert plan is not None
        fetched: list[Any] = []
        if ticket is not None:
            leaves, tree = tree_flatten(cotangent)
            leaves, ticket = _tied(leaves, ticket)
            cotangent = tree.unflatten(leaves)
            fetch = Fetch(self._depot, tuple(one.host for one in plan.passages), self._function)
            fetched = [
                one.back(host) for one, host in zip(plan.passages, host_call(fetch, ticket), strict=True)
            ]
        saved = [carried[index] if is_carried else fetched[index] for is_carried, index in plan.leaves]
        *args, kwargs, captured = plan.vjp.unflatten(saved)(cotangent)
        return tuple(args), kwargs, captured

    def _plan(self, args: Any, kwargs: Any, captured: Any) -> _Plan:
        """What the forward saves, traced once, so that every forward and backward of this call agree on it."""
        if self._known is None:
            program, (_, vjp) = jax.make_jaxpr(self._vjp, return_shape=True)(args, kwargs, captured)
            self._known = self._planned(program, vjp)
        return self._known

    def _vjp(self, args: Any, kwargs: Any, captured: Any) -> Any:
        def positional(*primals: Any) -> Any:
            return self.primal(primals[:-2], *primals[-2:])

        return jax.vjp(positional, *args, kwargs, captured, in_nzs=self._moving)

    def _planned(self, program: ClosedJaxpr, vjp: Any) -> _Plan:
        saved = program.jaxpr.outvars[self._out_tree.num_leaves :]
        operands = {
            id(var): index for index, var in enumerate(program.jaxpr.invars) if not self._saveable[index]
        }
        carried: dict[int, int] = {}
        stored: dict[int, int] = {}
        leaves = []
        for var in saved:
            where = carried if id(var) in operands else stored
            leaves.append((where is carried, where.setdefault(id(var), len(where))))
        first = {id(var): index for index, var in reversed(list(enumerate(saved)))}
        kept = [first[one] for one in stored]
        residuals = residuals_of(vjp, linearized(vjp), longest_path=self._longest_path)
        return _Plan(
            program=program,
            vjp=tree_structure(vjp),
            leaves=leaves,
            carried=[operands[one] for one in carried],
            stored=kept,
            passages=tuple(Passage.of(saved[index].aval, residuals[index].path) for index in kept),
            places=tuple(Place(residuals[index].channel, residuals[index].path) for index in kept),
        )


def _tied(arrays: Sequence[Any], ticket: Any) -> tuple[list[Any], Any]:
    """The same values, none of which is there before all are.

    Without this XLA moves residuals out as late and back as early as it can, and saves no memory.
    """
    is_plain = [
        isinstance(array, jax.Array) and not jnp.issubdtype(array.dtype, jax.dtypes.extended)
        for array in arrays
    ]
    *tied, ticket = jax.lax.optimization_barrier([*compress(arrays, is_plain), ticket])
    rest = iter(tied)
    return [next(rest) if plain else array for array, plain in zip(arrays, is_plain, strict=True)], ticket


def _varying(ticket: Any) -> Any:
    """The ticket as a value that differs between devices, which it does inside of `jax.shard_map`."""
    axes = tuple(jax.sharding.get_abstract_mesh().manual_axes)
    return jax.lax.pcast(ticket, axes, to="varying") if axes else ticket
