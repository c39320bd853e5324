"""The program: the lowered backward pass, its fingerprint, and its export.

The fingerprint is a SHA-256 over the StableHLO of the backward without source locations, the avals, states and trees of
leaves, arguments and outputs, and the JAX version.
The jaxpr's text will not do: it prints the backward rule of a ``custom_vjp`` by its name only.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax import export
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.tree_util import tree_leaves, tree_structure

from residual_client.callbacks import Unfollowable, digest_callbacks
from residual_client.jax_compat import (
    TreeDef,
    host_callbacks,
    stripped,
    without_locations,
)
from residual_client.linearization import Linearized
from residual_client.transfer import Residual, abstract, leaf_of
from residual_client.trees import describe, difference
from residual_client.vjp import arguments_of, fill, residuals_of
from residual_store.leaf import Aval, Leaf
from residual_store.manifest import Argument, Manifest

__all__ = ["Lowered", "Program", "Signature", "bundle_signature", "lower", "text_difference", "text_of"]

_PLATFORMS = ("cpu", "cuda", "tpu")


@dataclass(frozen=True, kw_only=True)
class Signature:
    """All of a program but its operations: what goes in, what comes out, and in which trees."""

    jax_version: str
    leaves: tuple[tuple[str, str], ...]
    arguments: tuple[tuple[str, str, bool, str], ...]
    cotangents: tuple[str, ...]
    in_tree: list[Any]
    out_tree: list[Any]

    def difference(self, other: Signature) -> str | None:
        """The first thing in which ``other`` differs, in words, or None."""
        if self.jax_version != other.jax_version:
            return f"the bundle was made with jax {self.jax_version} and this is jax {other.jax_version}"
        for root, tree in (("args", "in_tree"), ("output", "out_tree")):
            if text := difference(getattr(self, tree), getattr(other, tree), root=root):
                return text
        for what in ("in_tree", "out_tree", "arguments", "leaves", "cotangents"):
            one, another = getattr(self, what), getattr(other, what)
            if one != another:
                return f"{what} differ: {_first_difference(one, another)}"
        return None


@dataclass(frozen=True, kw_only=True)
class Lowered:
    """The operations of a backward: the SHA-256 of its StableHLO, and its exported form or the reason why there is none.

    ``callbacks`` is a digest of the host functions that it calls; ``is_distinct`` is false if they cannot be told apart.
    """

    operations: str
    exported: bytes | None = None
    platforms: tuple[str, ...] = ()
    no_program: str | None = None
    callbacks: str | None = None
    is_distinct: bool = True


@dataclass(frozen=True, kw_only=True)
class Program:
    """A backward pass that this process has traced.

    ``treedef`` turns leaves into a VJP object.
    ``fingerprint`` is None where two different programs could not be told apart.
    """

    treedef: TreeDef
    signature: Signature
    function: str
    lowered: Lowered
    fingerprint: str | None


def signature_of(
    leaves: Sequence[Leaf],
    arguments: Sequence[Argument],
    cotangents: Sequence[Aval],
    in_tree: Sequence[Any],
    out_tree: Sequence[Any],
    *,
    jax_version: str,
) -> Signature:
    """The signature of a program or, from a manifest, of a bundle."""
    return Signature(
        jax_version=jax_version,
        leaves=tuple((leaf.channel, _leaf_text(leaf)) for leaf in leaves),
        arguments=tuple((one.path, one.state, one.needed, str(one.aval)) for one in arguments),
        cotangents=tuple(map(str, cotangents)),
        in_tree=list(in_tree),
        out_tree=list(out_tree),
    )


def _leaf_text(leaf: Leaf) -> str:
    aval = Aval(dtype=leaf.dtype, shape=leaf.shape, weak_type=leaf.weak_type)
    return f"{aval} of {leaf.key_impl} keys" if leaf.kind == "key" else str(aval)


def lower(vjp: Any, known: Linearized, *, longest_path: int) -> Program:
    """Trace, lower and export the backward of a VJP object, whose leaves may be abstract; makes one lowering."""
    residuals = residuals_of(vjp, known, longest_path=longest_path)
    arguments = arguments_of(vjp, known, longest_path=longest_path)
    cotangents = tuple(map(abstract, known.outputs))
    in_tree, out_tree = describe(vjp.in_tree), describe(vjp.out_tree)
    leaves = [leaf_of(index, residual) for index, residual in enumerate(residuals)]
    signature = signature_of(leaves, arguments, cotangents, in_tree, out_tree, jax_version=jax.__version__)
    reason = _why_not(known, residuals)
    if reason is None:
        lowered = _lower_flat(*_flat_backward(vjp, known, arguments, residuals))
    else:
        lowered = Lowered(operations="", no_program=reason, is_distinct=False)
    return Program(
        treedef=tree_structure(vjp),
        signature=signature,
        function=known.function,
        lowered=lowered,
        fingerprint=fingerprint_of(signature, lowered),
    )


def _flat_backward(
    vjp: Any, known: Linearized, arguments: Sequence[Argument], residuals: Sequence[Residual]
) -> Any:
    """The backward over flat lists, and the abstract values that go in.

    Pytrees would not do: `Exported.serialize` fails on integer keys, NamedTuples and sentinels.
    """
    treedef: TreeDef = tree_structure(vjp)
    out_tree: TreeDef = vjp.out_tree
    missing = [index for index, argument in enumerate(arguments) if argument.must_be_restored]

    def backward(leaves: list[Any], restored: list[Any], cotangents: list[Any]) -> list[Any]:
        whole = fill(
            treedef.unflatten(leaves), dict(zip(missing, restored, strict=True)), arguments, complete=True
        )
        return tree_leaves(whole.replace(want_logs=False)(out_tree.unflatten(cotangents)))

    inputs = (
        [_input(residual.value) for residual in residuals],
        [_input(known.saved[index]) for index in missing],
        [_input(aval) for aval in known.outputs],
    )
    # JAX drops inputs that are not used and numbers the rest, so without this two backwards that read different
    # residuals of one shape would have equal operations, and one fingerprint.
    return jax.jit(backward, keep_unused=True), inputs


def _input(value: Any) -> jax.ShapeDtypeStruct:
    """The abstract value alone: where a leaf happens to lie must not be a part of the program, its typed mesh must."""
    sharding = getattr(value, "sharding", None)
    if isinstance(sharding, NamedSharding) and AxisType.Explicit in sharding.mesh.axis_types:
        mesh = sharding.mesh.abstract_mesh if isinstance(sharding.mesh, Mesh) else sharding.mesh
        sharding = NamedSharding(mesh, sharding.spec)
    else:
        sharding = None
    weak_type = bool(getattr(value, "weak_type", False))
    return jax.ShapeDtypeStruct(value.shape, value.dtype, weak_type=weak_type, sharding=sharding)


def _why_not(known: Linearized, residuals: Sequence[Residual]) -> str | None:
    """Why a VJP object has no backward of its own that could be lowered."""
    if known.refs:
        return "an argument is a Ref, so its gradient is accumulated in place by with_refs"
    mapped = next((residual for residual in residuals if residual.is_mapped), None)
    if mapped is not None:
        return (
            f"{mapped.path} has shape {tuple(mapped.value.shape)} and the backward was traced for "
            f"{tuple(mapped.expected.shape)}, so the VJP object was mapped and is applied under jax.vmap, or the leaf was changed"
        )
    return None


def _lower_flat(backward: Any, inputs: Any) -> Lowered:
    """Export for all platforms together, else for the one at hand, else only lower."""
    reason = ""
    for platforms in (_PLATFORMS, (export.default_export_platform(),)):
        try:
            exported = stripped(export.export(backward, platforms=platforms)(*inputs))
            program = bytes(exported.serialize())
        except Exception as error:  # noqa: BLE001 - jax.export raises KeyError, NotImplementedError, ValueError and more
            reason = f"jax.export cannot serialize the backward: {type(error).__name__}: {error}"[:500]
        else:
            return Lowered(
                operations=_sha256(without_locations(exported.mlir_module())),
                exported=program,
                platforms=platforms,
            )
    try:
        text = without_locations(backward.lower(*inputs).as_text())
    except Exception as error:  # noqa: BLE001 - outside of the mapping in which it was made it may raise anything
        reason = f"the backward cannot be traced on its own: {type(error).__name__}: {error}"[:500]
        return Lowered(operations="", no_program=reason, is_distinct=False)
    try:
        callbacks = digest_callbacks(host_callbacks(backward.trace(*inputs).jaxpr))
    except Unfollowable as error:
        reason += f"; and a host callback cannot be told from another one: {error}"
        return Lowered(operations=_sha256(text), no_program=reason, is_distinct=False)
    return Lowered(operations=_sha256(text), no_program=reason, callbacks=callbacks)


def fingerprint_of(signature: Signature, lowered: Lowered) -> str | None:
    """The name of a program: 64 hexadecimal digits, or None if it cannot be told from others."""
    if not lowered.is_distinct:
        return None
    return _sha256(
        json.dumps(
            [vars(signature), lowered.operations, lowered.callbacks], sort_keys=True, default=bytes.hex
        )
    )


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def bundle_signature(manifest: Manifest) -> Signature:
    """The signature that a bundle was stored with."""
    return signature_of(
        manifest.leaves,
        manifest.arguments,
        manifest.cotangents,
        manifest.in_tree,
        manifest.out_tree,
        jax_version=manifest.versions.get("jax", "?"),
    )


def text_of(program: bytes) -> str:
    """The StableHLO of a serialized program without source locations; raises whatever jax.export raises for damage."""
    return without_locations(export.deserialize(bytearray(program)).mlir_module())


def text_difference(recorded: str, given: str) -> str:
    """The first line in which two lowered programs differ, in words."""
    for number, (one, other) in enumerate(zip(recorded.splitlines(), given.splitlines(), strict=False), 1):
        if one != other:
            return f"line {number} of the lowered backward was '{_clipped(one)}' and is '{_clipped(other)}'"
    return "one lowered backward goes on where the other ends"


def _first_difference(one: Any, other: Any) -> str:
    if isinstance(one, tuple) and isinstance(other, tuple):
        if len(one) != len(other):
            return f"there were {len(one)} and are {len(other)}"
        pairs = [pair for pair in zip(one, other, strict=True) if pair[0] != pair[1]]
        one, other = pairs[0]
    return f"was {_clipped(str(one))} and is {_clipped(str(other))}"


def _clipped(text: str) -> str:
    text = text.strip()
    return text if len(text) <= 160 else text[:157] + "..."
