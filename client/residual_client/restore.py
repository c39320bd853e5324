"""Restore: a bundle becomes a VJP object again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax
from jax.sharding import Sharding

from residual_client.jax_compat import TreeDef
from residual_client.meshes import Meshes, named, symbolic
from residual_client.program import Program, bundle_signature, text_difference, text_of
from residual_client.refusals import about
from residual_client.staging import Staging
from residual_client.transfer import (
    as_host,
    check_precision,
    placement_for,
    placement_of,
    to_device,
    x64_enabled,
)
from residual_client.vjp import check_arguments, fill, in_tree_of
from residual_store.bundle import Bundle, digest_of
from residual_store.errors import (
    MeshMismatch,
    PrecisionMismatch,
    ProgramMismatch,
    ProgramUnavailable,
    ResidualStoreError,
)
from residual_store.leaf import Leaf
from residual_store.manifest import Manifest
from residual_store.store import Store

__all__ = ["check_program", "check_widths", "not_traced", "place_anywhere", "placements_like", "rebuild"]


def rebuild(
    bundle: Bundle,
    treedef: TreeDef,
    placements: Sequence[Sharding | None] | None,
    *,
    key: str,
    args: Sequence[Any] | None,
    staging: Staging,
    as_numpy: bool = False,
) -> Any:
    """The VJP object of a bundle in a treedef whose program is known to be the bundle's.

    Raises `ArgumentMismatch`, `PrecisionMismatch` or `MeshMismatch`.
    """
    manifest = bundle.manifest
    with about(key):
        check_widths(manifest)
        if manifest.x64 and not x64_enabled():
            raise PrecisionMismatch(
                "it was made with jax_enable_x64 on and that is off here, so what the backward computes in 64 bits "
                "would be cut to 32; set jax_enable_x64, or apply the stored program with client.backward"
            )
        values = check_arguments(args, manifest.arguments, manifest.in_tree, treedef=in_tree_of(treedef))
        if as_numpy:
            leaves = [as_host(bundle.array(leaf.index), leaf) for leaf in manifest.leaves]
        else:
            leaves = place_leaves(bundle, placements, live=values.values(), staging=staging)
        return fill(treedef.unflatten(leaves), values, manifest.arguments, complete=args is not None)


def placements_like(like: Sequence[Any], leaves: Sequence[Leaf]) -> list[Sharding | None]:
    """Where each leaf goes so that it is where that of ``like`` is; None stands for: where its record says."""
    return [
        one.sharding if leaf.sharding is not None and isinstance(one, jax.Array) else placement_of(one)
        for one, leaf in zip(like, leaves, strict=True)
    ]


def check_widths(manifest: Manifest) -> None:
    """Raise `PrecisionMismatch` if anything in the bundle is wider than this process allows."""
    named = [(leaf.path, leaf.dtype) for leaf in manifest.leaves]
    named += [
        (argument.path, argument.aval.dtype) for argument in manifest.arguments if argument.aval is not None
    ]
    named += [("the cotangent", aval.dtype) for aval in manifest.cotangents]
    check_precision(named)


def place_leaves(
    bundle: Bundle, placements: Sequence[Sharding | None] | None, *, live: Any, staging: Staging
) -> list[Any]:
    """All leaves as arrays; ``placements`` go first, then the meshes and devices of the ``live`` arrays.

    Leaves that were one array are one array again.
    """
    meshes = Meshes(live)
    leaves = bundle.manifest.leaves
    own = [leaf for leaf in leaves if not _is_repeated(leaf, leaves, placements)]
    targets = [
        (placements[leaf.index] if placements is not None else None) or placement_for(leaf, meshes)
        for leaf in own
    ]
    arrays = to_device([bundle.array(leaf.index) for leaf in own], own, targets, staging)
    placed: dict[int | None, Any] = {leaf.index: array for leaf, array in zip(own, arrays, strict=True)}
    return [placed[leaf.index if leaf.index in placed else leaf.alias_of] for leaf in leaves]


def place_anywhere(bundle: Bundle, *, staging: Staging) -> list[Any]:
    """All leaves for a stored program, which is lowered for device memory and for no device in particular."""
    leaves = tuple(leaf.changed(memory_kind=None, committed=False) for leaf in bundle.manifest.leaves)
    movable = replace(bundle, manifest=replace(bundle.manifest, leaves=leaves))
    return place_leaves(movable, None, live=(), staging=staging)


def _is_repeated(leaf: Leaf, leaves: Sequence[Leaf], placements: Sequence[Sharding | None] | None) -> bool:
    """Whether a leaf was the array of an earlier one, and belongs where that does."""
    if leaf.alias_of is None or not leaf.same_array:
        return False
    source = leaves[leaf.alias_of]
    where = placements is None or placements[leaf.index] == placements[source.index]
    names = ("kind", "dtype", "shape", "weak_type", "committed", "memory_kind", "sharding", "key_impl")
    return where and all(getattr(leaf, name) == getattr(source, name) for name in names)


def not_traced(manifest: Manifest, key: str) -> ProgramUnavailable:
    """The error for who restores a bundle without ``like`` where its program is not known, with what to do instead."""
    if manifest.fingerprint is None:
        return ProgramUnavailable(
            f"{key!r} can be restored only from its handle, in the process that offloaded it: "
            + (manifest.no_program or "it is a scratch bundle"),
            key=key,
        )
    source_free = ", or use client.backward, which needs no source" if manifest.program is not None else ""
    return ProgramUnavailable(
        f"this process has not traced the program of {key!r} ({manifest.function}); pass "
        f"like=jax.eval_shape(forward, *args)[1] with the same forward{source_free}",
        key=key,
    )


def check_program(
    manifest: Manifest, program: Program, like: Sequence[Any], *, key: str, store: Store
) -> None:
    """Raise `ProgramMismatch`, which names the first difference, unless the bundle's program is this one.

    Raises `MeshMismatch`, which names both meshes too, if the leaves of ``like`` are on another one than the bundle's.
    """
    if manifest.fingerprint is not None and manifest.fingerprint == program.fingerprint:
        return
    if program.fingerprint is None or manifest.fingerprint is None:
        reason = program.lowered.no_program if program.fingerprint is None else manifest.no_program
        raise ProgramMismatch(
            f"{key!r} cannot be restored through another VJP object: {reason}; restore it from the handle "
            "in the process that offloaded it"
        )
    difference = bundle_signature(manifest).difference(program.signature) or _operations_difference(
        manifest, program, store
    )
    made_on = named(leaf.sharding for leaf in manifest.leaves)
    is_on = named(symbolic(getattr(leaf, "sharding", None), len(leaf.shape)) for leaf in like)
    if made_on != is_on and any(isinstance(leaf, jax.Array) for leaf in like):
        raise MeshMismatch(
            f"{key!r} was made on {made_on} and the VJP object given is on {is_on}, where its backward is another "
            f"program: {difference}; pass like= from a mesh with the same axes, which may be smaller, "
            "or as_numpy=True with the handle where it was made"
        )
    raise ProgramMismatch(
        f"{key!r} was made by another backward program than that of {program.function or 'the VJP object given'}, "
        f"so restoring it could give a wrong gradient: {difference}; "
        "pass like= from the same function and arguments, jitted if that one was"
        + (", or apply the stored one with client.backward" if manifest.program is not None else "")
    )


def _operations_difference(manifest: Manifest, program: Program, store: Store) -> str:
    try:
        stored = store.get_program(manifest.fingerprint or "")
    except ResidualStoreError:
        stored = b""
    if digest_of(stored) != manifest.program or program.lowered.exported is None:
        return "the operations of the lowered backward differ"
    return text_difference(text_of(stored), text_of(program.lowered.exported))
