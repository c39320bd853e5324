"""Functions with the store inside: `Client.fwd_and_bwd` and `Client.offloaded`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from operator import index
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jax.tree_util import tree_leaves, tree_map

from residual_client.depot import Depot
from residual_client.handle import Handle
from residual_client.jax_compat import NotSaveable
from residual_client.offloaded import differentiable, positions_of
from residual_store.store import Store

__all__ = ["Offloaded", "fwd_and_bwd", "offloaded"]


class Offloading(Protocol):
    """What these functions need of a client."""

    store: Store
    depot: Depot

    def offload(self, vjp: Any) -> Handle:
        """Store the residuals of a VJP object."""

    def restore(self, source: Handle, *, args: Sequence[Any] | None = None) -> Any:
        """The VJP object again."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Offloaded:
    """What stands for the residuals between ``fwd`` and ``bwd``.

    ``args`` has the arguments that were not saveable and that the backward reads, and None for the others.
    The stored bundle goes when this object and its handle are gone.
    """

    handle: Handle
    args: tuple[Any, ...] = field(repr=False)


def offloaded(
    self: Offloading,
    fun: Callable[..., Any],
    *,
    saveable_args: Any = True,
    static_argnums: int | Sequence[int] = (),
) -> Callable[..., Any]:
    """``fun`` with its residuals in the store between forward and backward, for the layers of a compiled training step.

    It works inside of `jax.jit`, `jax.grad`, `jax.lax.scan`, `jax.vmap`, `jax.lax.cond` and `jax.shard_map`, and around
    `jax.checkpoint`.
    Under `jax.vmap` all outputs have a batch axis as soon as one argument has.
    A call that is not differentiated stores nothing, and a backward deletes what it has read.
    ``saveable_args`` is that of `jax.vjp`: what it marks False, such as weights, stays on the device, and so do
    values that ``fun`` closes over.
    ``static_argnums`` are positions of arguments that are no arrays, as in `jax.checkpoint`.

    What goes wrong in the store is raised by JAX as `jax.errors.JaxRuntimeError`, whose text names key and leaf.
    Raises TypeError for a derivative in forward mode and for a second one.

    >>> layer_in_store = client.offloaded(layer, saveable_args=(False, True))
    >>> dW, dx = jax.jit(jax.grad(lambda W, x: layer_in_store(W, x).sum(), argnums=(0, 1)))(W, x)
    """
    return differentiable(
        fun,
        self.depot,
        saveable_args=saveable_args,
        static_argnums=_numbers(static_argnums),
        longest_path=self.store.settings.max_path_chars,
    )


def fwd_and_bwd(
    self: Offloading,
    fun: Callable[..., Any],
    argnums: int | Sequence[int],
    has_aux: bool = False,
    jitted: bool = True,
    *,
    saveable_args: Any = True,
) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """The two functions of `jax.fwd_and_bwd`, with the residuals in a scratch bundle in between.

    ``fwd(*args, **kwargs)`` returns ``(y, residuals)``, or ``(y, residuals, aux)`` with ``has_aux``, and
    ``bwd(residuals, y_bar)`` the gradients of the arguments ``argnums``, a tuple unless that is an integer.
    ``saveable_args`` is that of `jax.vjp` for these arguments; those that are not saved are kept alive until the
    residuals are gone.

    Raises what `Client.offload` and `Client.restore` raise.

    >>> fwd, bwd = client.fwd_and_bwd(layer, argnums=(0, 1), saveable_args=(False, True))
    >>> y, residuals = fwd(W, x)
    >>> dW, dx = bwd(residuals, jnp.ones_like(y))
    """
    numbers = _numbers(argnums)

    def vjp(*args: Any, **kwargs: Any) -> Any:
        positions = positions_of(numbers, len(args))

        def partial(*primals: Any) -> Any:
            whole = list(args)
            for position, primal in zip(positions, primals, strict=True):
                whole[position] = primal
            return fun(*whole, **kwargs)

        primals = [args[position] for position in positions]
        make: Any = jax.vjp
        return make(partial, *primals, has_aux=has_aux, saveable_args=saveable_args)

    def apply(f_vjp: Any, outgrad: Any) -> Any:
        gradients = f_vjp(outgrad)
        return gradients if isinstance(argnums, Sequence) else gradients[0]

    if jitted:
        vjp, apply = jax.jit(vjp), jax.jit(apply)

    def fwd(*args: Any, **kwargs: Any) -> Any:
        y, f_vjp, *aux = vjp(*args, **kwargs)
        primals = [args[position] for position in positions_of(numbers, len(args))]
        missing = tuple(map(_if_missing, primals, f_vjp.args_res))
        return y, Offloaded(handle=self.offload(f_vjp), args=missing), *aux

    def bwd(residuals: Offloaded, outgrad: Any) -> Any:
        if not isinstance(residuals, Offloaded):
            raise TypeError(
                f"bwd takes the residuals of fwd and then the cotangent, and this is a {type(residuals).__name__}"
            )
        return apply(self.restore(residuals.handle, args=residuals.args), outgrad)

    return fwd, bwd


def _numbers(argnums: int | Sequence[int]) -> tuple[int, ...]:
    return tuple(map(index, argnums)) if isinstance(argnums, Sequence) else (index(argnums),)


def _if_missing(primal: Any, saved: Any) -> Any:
    """The argument as JAX has seen it, if the VJP object lacks any part of it."""
    if not any(isinstance(leaf, NotSaveable) for leaf in tree_leaves(saved, is_leaf=_is_not_saveable)):
        return None
    return tree_map(lambda leaf: leaf if isinstance(leaf, jax.Array) else jnp.array(leaf), primal)


def _is_not_saveable(value: Any) -> bool:
    return isinstance(value, NotSaveable)
