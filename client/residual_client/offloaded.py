"""A function whose residuals wait in a store from its forward to its backward, inside of a compiled step."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain, compress
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import jaxpr_as_fun
from jax.tree_util import keystr, tree_flatten, tree_leaves, tree_leaves_with_path, tree_map, tree_structure

from residual_client.depot import Depot, Fetch, Stow
from residual_client.host_call import host_call
from residual_client.jax_compat import TreeDef, is_ref
from residual_client.mapped_together import mapped_together
from residual_client.residual_plan import Plan
from residual_client.trees import children_of
from residual_store.errors import LeafUnavailable

__all__ = ["differentiable", "positions_of"]


def differentiable(
    fun: Callable[..., Any],
    depot: Depot,
    *,
    saveable_args: Any,
    static_argnums: Sequence[int],
    longest_path: int,
) -> Callable[..., Any]:
    """``fun`` with its residuals in ``depot`` between forward and backward; see `Client.offloaded`."""

    @functools.wraps(fun)
    def apply(*args: Any, **kwargs: Any) -> Any:
        static = positions_of(static_argnums, len(args))
        moving = [position for position in range(len(args)) if position not in static]
        primals = tuple(args[position] for position in moving)

        @functools.wraps(fun)  # JAX's errors then name the function.
        def whole(primals: Any, kwargs: Any) -> Any:
            given = dict(enumerate(args)) | dict(zip(moving, primals, strict=True))
            return fun(*given.values(), **kwargs)

        _check_values(primals, kwargs)
        traced, shape = jax.make_jaxpr(whole, return_shape=True)(primals, kwargs)
        captured = list(traced.consts)
        _check_values(captured)
        entries = _entries(saveable_args, len(args))
        flags = [_flags(entries[position], tree_structure(args[position])) for position in moving]
        kept = [[saveable_args is not False] * len(tree_leaves(kwargs)), [False] * len(captured)]
        call = _Call(
            # Without the captured values, because JAX keeps the call for as long as its caches.
            program=traced.replace(consts=[]),
            out_tree=tree_structure(shape),
            function=getattr(fun, "__qualname__", repr(fun)),
            saveable=list(chain(*flags, *kept)),
            # What JAX differentiates is always a tracer.
            in_nzs=tree_map(lambda leaf: isinstance(leaf, jax.core.Tracer), (*primals, kwargs, captured)),
            depot=depot,
            longest_path=longest_path,
        )
        return call.differentiable()(primals, kwargs, captured)

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


def _check_values(*values: Any) -> None:
    for path, leaf in tree_leaves_with_path(values):
        if is_ref(leaf):
            raise LeafUnavailable(
                f"{keystr(path)} is a mutable reference, and what it holds at the backward is not what the forward "
                "read; read it outside of the function and pass the value"
            )


def _entries(saveable: Any, count: int) -> Sequence[Any]:
    """What ``saveable_args`` says of each positional argument."""
    if isinstance(saveable, bool):
        return [saveable] * count
    if len(saveable) != count:
        raise TypeError(f"saveable_args has {len(saveable)} entries for {count} positional arguments")
    entries: Sequence[Any] = saveable
    return entries


def _flags(saveable: Any, tree: TreeDef) -> list[bool]:
    """One flag per leaf, from a bool or a container with one entry per child, as `jax.vjp` takes them."""
    if isinstance(saveable, bool):
        return [saveable] * tree.num_leaves
    entries, children = tree_leaves(saveable, is_leaf=lambda one: one is not saveable), children_of(tree)
    if len(entries) != len(children):
        raise TypeError(f"saveable_args has {saveable!r} for an argument of the structure {tree}")
    return list(chain.from_iterable(map(_flags, entries, children)))


@dataclass(kw_only=True, eq=False)
class _Call:
    """One call of a function, traced for the shapes of its arguments; its operands are arguments and captured values."""

    program: Any
    out_tree: TreeDef
    function: str
    saveable: list[bool]
    in_nzs: Any
    depot: Depot
    longest_path: int
    plan: Plan | None = None

    def differentiable(self) -> Callable[..., Any]:
        """The function of the operands with its derivative."""
        function = jax.custom_vjp(self.primal)
        function.defvjp(self.forward, self.backward)
        return function

    def primal(self, args: Any, kwargs: Any, captured: Any) -> Any:
        """The function itself, which stores nothing."""
        outputs = jaxpr_as_fun(self.program)(*captured, *tree_leaves((args, kwargs)))
        return self._returned(outputs, (args, kwargs, captured))

    def _returned(self, outputs: Sequence[Any], operands: Any) -> Any:
        together = mapped_together([*outputs, *tree_leaves(operands)])
        return self.out_tree.unflatten(together[: len(outputs)])

    def forward(self, args: Any, kwargs: Any, captured: Any) -> tuple[Any, Any]:
        """The outputs, and what the backward needs: a ticket for what is stored, and the operands that it reads."""
        if self.plan is None:
            program, (_, vjp) = jax.make_jaxpr(self._vjp, return_shape=True)(args, kwargs, captured)
            self.plan = Plan.of(program, vjp, saveable=self.saveable, longest_path=self.longest_path)
        # JAX gives Python's scalars as they are.
        operands = [
            leaf if hasattr(leaf, "dtype") else jnp.asarray(leaf)
            for leaf in tree_leaves((args, kwargs, captured))
        ]
        outputs, carried, leaving = self.plan.run(operands)
        ticket = None
        if leaving:
            if self.plan.is_constant:
                # JAX would take a put that nothing of the step goes into out of a loop, and each backward takes it away.
                leaving = _tied([*leaving, *operands], jnp.uint32(0))[0][: len(leaving)]
            (ticket,) = host_call(Stow(self.depot, self.plan.places, self.function), *leaving)
            outputs, ticket = _tied(outputs, _varying(ticket))
        return self._returned(outputs, operands), (ticket, carried)

    def backward(self, residuals: Any, cotangent: Any) -> tuple[Any, ...]:
        """The gradients of the operands."""
        assert self.plan is not None
        ticket, carried = residuals
        arrived: list[jax.Array] = []
        if ticket is not None:
            tree: TreeDef
            leaves, tree = tree_flatten(cotangent)
            leaves, ticket = _tied(leaves, ticket)
            cotangent = tree.unflatten(leaves)
            travelled = tuple(passage.host for passage in self.plan.passages)
            arrived = host_call(Fetch(self.depot, travelled, self.function), ticket)
        *args, kwargs, captured = self.plan.vjp_of(carried, arrived)(cotangent)
        return tuple(args), kwargs, captured

    def _vjp(self, args: Any, kwargs: Any, captured: Any) -> Any:
        def positional(*primals: Any) -> Any:
            return self.primal(primals[:-2], *primals[-2:])

        return jax.vjp(positional, *args, kwargs, captured, in_nzs=self.in_nzs)


def _tied(arrays: Sequence[Any], ticket: Any) -> tuple[list[Any], Any]:
    """The same values, none of which is there before all are.

    Without this XLA moves residuals out as late and back as early as it can, which takes more memory than it saves.
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
