"""Offload: the manifest of a VJP object, and how its bundle is to be stored."""

from __future__ import annotations

import importlib.metadata
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np

from residual_client.jax_compat import TreeDef
from residual_client.known_leaves import KnownLeaves
from residual_client.linearization import Linearized
from residual_client.program import Program
from residual_client.program_cache import ProgramCache
from residual_client.transfer import Residual, abstract, leaf_of, x64_enabled
from residual_client.trees import describe
from residual_client.vjp import argument_digest, arguments_of, check_arguments
from residual_store.bundle import Bundle, digest_of
from residual_store.engine.terms import check_durability, check_if_exists, check_ttl
from residual_store.manifest import Argument, Manifest, UserValue, labels
from residual_store.parts import Part
from residual_store.settings import Settings
from residual_store.store import Durability, IfExists, Receipt

__all__ = ["Draft", "Terms", "manifest_of"]

_VERSIONS = {
    "jax": jax.__version__,
    "numpy": np.__version__,
    "residual-store": importlib.metadata.version("residual-store"),
}


@dataclass(frozen=True, kw_only=True)
class Terms:
    """How a bundle is to be put, as in `Store.put`."""

    key: str
    durability: Durability | None
    ttl: float | None
    if_exists: IfExists

    def check(self, settings: Settings) -> None:
        """Raise `InvalidOption` for what no store would take."""
        check_durability(self.durability, has_durable_tier=True)
        check_ttl(self.ttl, settings)
        check_if_exists(self.if_exists)


@dataclass(frozen=True, kw_only=True)
class Draft:
    """How a bundle is to be stored, with its program; another thread can do that."""

    program: Program | None
    part: Part | None
    terms: Terms

    def put(
        self, known: KnownLeaves, programs: ProgramCache, bundle: Bundle, moved: Callable[[int], object]
    ) -> Receipt:
        """Store the bundle, without the leaves that its run holds, and its program; raises what `Store.put` raises."""
        if self.program is not None:
            programs.store(self.program)
        terms = self.terms
        receipt = known.put(
            terms.key,
            bundle,
            durability=terms.durability,
            ttl=terms.ttl,
            if_exists=terms.if_exists,
            part=self.part,
            moved=moved,
        )
        if self.program is None or receipt.has_program:
            return receipt
        # The store has forgotten it, as a server in memory does when it starts anew.
        return replace(receipt, has_program=programs.store(self.program, again=True))


def manifest_of(
    vjp: Any,
    known: Linearized,
    residuals: list[Residual],
    program: Program | None,
    *,
    key: str,
    settings: Settings,
    args: Sequence[Any] | None = None,
    user: Mapping[str, UserValue] | None = None,
) -> Manifest:
    """The manifest of a VJP object, whose leaves are not encoded yet.

    Raises `ArgumentMismatch` for ``args`` that are not those of the call.
    """
    manifest = _manifest(vjp, known, program, residuals, settings)
    if args is not None:
        manifest = replace(manifest, arguments=_digested(manifest, args, vjp.in_tree))
    return replace(manifest, key=key, user=labels(user, settings))


def _manifest(
    vjp: Any, known: Linearized, program: Program | None, residuals: list[Residual], settings: Settings
) -> Manifest:
    leaves = tuple(leaf_of(index, residual) for index, residual in enumerate(residuals))
    return Manifest(
        fingerprint=program.fingerprint if program is not None else None,
        program=None
        if program is None or program.lowered.exported is None
        else digest_of(program.lowered.exported),
        platforms=() if program is None else program.lowered.platforms,
        no_program="it is a scratch bundle" if program is None else program.lowered.no_program,
        versions=_VERSIONS,
        x64=x64_enabled(),
        function=known.function[: settings.max_path_chars],
        created=time.time(),
        leaves=leaves,
        arguments=arguments_of(vjp, known, longest_path=settings.max_path_chars),
        cotangents=tuple(map(abstract, known.outputs)),
        in_tree=tuple(describe(vjp.in_tree)),
        out_tree=tuple(describe(vjp.out_tree)),
    )


def _digested(manifest: Manifest, args: Sequence[Any], in_tree: TreeDef) -> tuple[Argument, ...]:
    """The arguments with the digests of those that must be given back, so that a restore can check them."""
    values = check_arguments(args, manifest.arguments, manifest.in_tree, treedef=in_tree)
    return tuple(
        argument.changed(digest=argument_digest(values[index]))
        if argument.state == "not_saveable" and index in values
        else argument
        for index, argument in enumerate(manifest.arguments)
    )
