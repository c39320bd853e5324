"""Explain: what an offload of a VJP object would send, and where it comes from, before anything is sent."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import jax
import numpy as np
from jax.tree_util import tree_leaves

from residual_client.explanation import ExplainedLeaf, Explanation
from residual_client.jax_compat import residual_inputs
from residual_client.linearization import Linearized
from residual_client.origins import Origin, makers_of
from residual_client.staging import Staging
from residual_client.transfer import Residual, check_readable, is_key, leaf_of
from residual_client.trees import argument_paths
from residual_client.uses import users_of
from residual_client.vjp import arguments_of, check_vjp, residuals_of
from residual_store.digest import NO_DIGEST, digest_of
from residual_store.encoding import encode_all
from residual_store.leaf import Leaf
from residual_store.settings import Settings
from residual_store.shared_leaf import SharedLeaf

__all__ = ["explain"]

type Held = Callable[[Sequence[SharedLeaf]], Sequence[bool]]


def explain(
    vjp: Any,
    *,
    forward: Callable[..., Any] | None = None,
    args: Sequence[Any] = (),
    settings: Settings | None = None,
    staging: Staging | None = None,
    held: Held | None = None,
) -> Explanation:
    """What an offload of this VJP object would send, leaf by leaf; nothing is sent.

    Each leaf has its channel, shape, dtype and bytes, and whether it is constant, a mask, or a duplicate; for that its
    values are read.
    A VJP object without values, such as ``jax.eval_shape(forward, W, x)[1]`` or one that is being traced, or one over the
    devices of several processes will do too, and then constants and duplicates are not known.

    ``held`` says which of some leaves a run holds already, so that they are not sent again; `Client.explain` asks its store.

    Where a leaf comes from follows from the backward program, which says on which line of the model it is *used*, and from
    its shape, which says what it *looks like*, such as a weight.
    With ``forward``, the function that returns the VJP object, and its ``args``, real or abstract, the forward is traced
    once more, and the explanation says what *made* each leaf, and for sure what is captured or a copy of an argument.

    Raises what `Client.offload` raises for a VJP object that cannot be offloaded, and `ProgramMismatch` for another forward.

    >>> explanation = explain(jax.vjp(lambda x: jax.lax.sin(jax.lax.exp(x)), x)[1])
    >>> [leaf.where.partition(" at ")[0] for leaf in explanation.leaves]
    ['used by mul', 'used by mul']
    """
    known = check_vjp(vjp)
    settings = settings or Settings()
    longest = settings.max_path_chars
    residuals = residuals_of(vjp, known, longest_path=longest)
    is_abstract = not all(_has_value(residual.value) for residual in residuals)
    staging = staging or Staging(window_bytes=settings.staging_bytes)
    if is_abstract:
        leaves = [_without_value(index, residual) for index, residual in enumerate(residuals)]
    else:
        leaves = _encoded(residuals, staging)
        leaves = leaves if held is None else _without_held(leaves, held, settings.dedup_bytes)
    origins = _used(vjp, residuals) if forward is None else makers_of(forward, args, tree_leaves(vjp))
    return Explanation(
        function=known.function,
        leaves=tuple(
            ExplainedLeaf(leaf=leaf, origin=origin) for leaf, origin in zip(leaves, origins, strict=True)
        ),
        restored=_restored(vjp, known, longest),
        is_abstract=is_abstract,
    )


def _has_value(value: Any) -> bool:
    if isinstance(value, jax.Array):
        return not isinstance(value, jax.core.Tracer) and value.is_fully_addressable
    return isinstance(value, np.ndarray | np.generic)


def _without_value(index: int, residual: Residual) -> Leaf:
    value = jax.ShapeDtypeStruct(residual.value.shape, residual.value.dtype)
    leaf = leaf_of(index, replace(residual, value=value))
    return leaf.changed(encoding="bits") if leaf.dtype == "bool" and leaf.elements > 1 else leaf


def _encoded(residuals: Sequence[Residual], staging: Staging) -> list[Leaf]:
    """The entries of the leaves, encoded as an offload would, with their digests."""
    check_readable(residuals)
    values = [jax.random.key_data(one.value) if is_key(one.value) else one.value for one in residuals]
    identities = [id(residual.value) for residual in residuals]
    leaves = [leaf_of(index, residual) for index, residual in enumerate(residuals)]
    encoded = encode_all(list(staging.to_host(values)), identities, tiles=[leaf.tiles for leaf in leaves])
    return [
        leaf.changed(
            encoding=one.encoding,
            alias_of=one.alias_of,
            same_array=one.same_array,
            nbytes=one.payload.nbytes,
            digest=one.digest if one.digest != NO_DIGEST else digest_of(one.payload),
        )
        for leaf, one in zip(leaves, encoded, strict=True)
    ]


def _without_held(leaves: Sequence[Leaf], held: Held, least: int) -> list[Leaf]:
    """The entries as they are when those that the run holds are not sent."""
    large = [leaf for leaf in leaves if leaf.is_large(least)]
    answers = held([SharedLeaf.of(leaf) for leaf in large]) if large else ()
    known = {leaf.index for leaf, is_held in zip(large, answers, strict=True) if is_held}
    return [leaf.as_shared() if leaf.index in known else leaf for leaf in leaves]


def _used(vjp: Any, residuals: Sequence[Residual]) -> list[Origin]:
    """The origins as far as the VJP object itself tells: arguments for sure, and where the others are used."""
    inputs, paths = residual_inputs(vjp), argument_paths(vjp.in_tree)
    opaque = iter(users_of(inputs, paths, range(len(vjp.opaque_residuals))))
    return [
        Origin(kind="argument", text=residual.path)
        if residual.channel == "args_res"
        else next(opaque)
        if residual.channel == "opaque_residuals"
        else Origin(kind="computed", text=residual.path)
        for residual in residuals
    ]


def _restored(vjp: Any, known: Linearized, longest: int) -> tuple[str, ...]:
    arguments = arguments_of(vjp, known, longest_path=longest)
    return tuple(argument.path for argument in arguments if argument.must_be_restored)
