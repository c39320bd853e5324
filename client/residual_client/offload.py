"""Offload: a VJP object becomes a bundle."""

from __future__ import annotations

import importlib.metadata
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax
import numpy as np

from residual_client.jax_compat import Linearized, x64_enabled
from residual_client.program import Program
from residual_client.transfer import Host, Residual, abstract, leaf_of
from residual_client.trees import describe
from residual_client.vjp import argument_digest, arguments_of, check_arguments
from residual_store.blocks import Blocks
from residual_store.bundle import Bundle, digest_of
from residual_store.manifest import Argument, Manifest, UserValue, labels
from residual_store.parts import Piece, attempt_of, part_bundle
from residual_store.settings import Settings

__all__ = ["bundle_of"]

_VERSIONS = {
    "jax": jax.__version__,
    "numpy": np.__version__,
    "residual-store": importlib.metadata.version("residual-store"),
}


def bundle_of(
    vjp: Any,
    known: Linearized,
    residuals: list[Residual],
    copies: Iterable[Host | Blocks | Piece],
    program: Program | None,
    *,
    key: str,
    settings: Settings,
    args: Sequence[Any] | None = None,
    user: Mapping[str, UserValue] | None = None,
) -> Bundle:
    """The bundle of a VJP object whose ``residuals`` have the values ``copies``, which are not copied again.

    With the label of an attempt it is this process's part of the bundle, and ``copies`` are its pieces.
    Raises `LeafUnavailable`, which names the leaf, or `ArgumentMismatch` for ``args`` that are not those of the call.
    """
    manifest = _manifest(vjp, known, program, residuals, settings)
    if args is not None:
        manifest = replace(manifest, arguments=_digested(manifest, args))
    manifest = replace(manifest, key=key, user=labels(user, settings))
    identities = [id(residual.value) for residual in residuals]
    values = list(copies)
    pieces = [one for one in values if isinstance(one, Piece)]
    if attempt_of(manifest) is not None:
        return part_bundle(manifest, pieces, identities=identities)
    hosts = [one for one in values if not isinstance(one, Piece)]
    return Bundle.encoded(manifest, hosts, identities=identities)


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


def _digested(manifest: Manifest, args: Sequence[Any]) -> tuple[Argument, ...]:
    """The arguments with the digests of those that must be given back, so that a restore can check them."""
    values = check_arguments(args, manifest.arguments, manifest.in_tree)
    return tuple(
        argument.changed(digest=argument_digest(values[index]))
        if argument.state == "not_saveable" and index in values
        else argument
        for index, argument in enumerate(manifest.arguments)
    )
