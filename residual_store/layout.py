"""The layout: where the bytes of each leaf stand, and the rules that bind the leaves of one manifest together."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from residual_store.errors import InvalidManifest
from residual_store.leaf import Leaf

__all__ = ["ALIGNMENT", "check_layout", "offsets_of"]

ALIGNMENT = 64
"""Leaves start at multiples of this many bytes: a cache line, and what lets JAX on CPU alias host memory."""


def offsets_of(lengths: Sequence[int]) -> list[int]:
    """Where leaves of these lengths in bytes stand: ascending, aligned, no gap beyond padding, and 0 without bytes.

    >>> offsets_of([8, 0, 100, 4])
    [0, 0, 64, 192]
    """
    padded = [-(-nbytes // ALIGNMENT) * ALIGNMENT for nbytes in lengths]
    starts = itertools.accumulate(padded, initial=0)
    return [start if nbytes else 0 for start, nbytes in zip(starts, lengths, strict=False)]


def check_layout(leaves: Sequence[Leaf]) -> None:
    """Raise `InvalidManifest`, which names the leaf, unless order, lengths, offsets and encodings are as they must be."""
    lengths = [leaf.encoded_nbytes for leaf in leaves]
    places = list(zip(range(len(leaves)), lengths, offsets_of(lengths), strict=True))
    if [(leaf.index, leaf.nbytes, leaf.offset) for leaf in leaves] != places:
        raise InvalidManifest(_misplaced(leaves, places))
    for leaf in leaves:
        if leaf.encoding != "raw" or leaf.alias_of is not None or leaf.kind != "array":
            _check_encoding(leaf, leaves)


def _misplaced(leaves: Sequence[Leaf], places: Sequence[tuple[int, int, int]]) -> str:
    """What is wrong with the first leaf that is not at its place: index, length and offset."""
    for leaf, (index, nbytes, offset) in zip(leaves, places, strict=True):
        where = f"leaves[{index}]"
        if leaf.index != index:
            return f"{where}.index is {leaf.index}; leaves stand in the order of their index"
        if leaf.nbytes != nbytes:
            kind = f"{leaf.dtype}{list(leaf.shape)} as {leaf.encoding}"
            return f"{where}.nbytes is {leaf.nbytes}, but {kind} has {nbytes}"
        if leaf.offset != offset:
            break
    return (
        f"{where}.offset is {leaf.offset} and must be {offset}: ascending, {ALIGNMENT}-byte aligned, "
        "no overlap and no gap beyond padding"
    )


def _check_encoding(leaf: Leaf, leaves: Sequence[Leaf]) -> None:
    where = f"leaves[{leaf.index}]"
    if (leaf.alias_of is None) == (leaf.encoding == "alias"):
        raise InvalidManifest(f"{where}.alias_of is for the encoding alias and only for it")
    if leaf.encoding == "bits" and leaf.dtype != "bool":
        raise InvalidManifest(f"{where} packs {leaf.dtype} as bits; only bool can be")
    if leaf.encoding not in ("raw", "bits", "alias") and not leaf.array_nbytes:
        raise InvalidManifest(f"{where} is {leaf.encoding} and has no element")
    if leaf.is_shared and not leaf.is_sealed:
        raise InvalidManifest(f"{where} is {leaf.encoding} and has no digest, by which its bytes are found")
    if leaf.is_tiled and leaf.tiles < 2:
        raise InvalidManifest(
            f"{where} is {leaf.encoding}, and its sharding does not split dimension 0 into equal parts"
        )
    if leaf.kind == "key" and leaf.key_impl is None:
        raise InvalidManifest(f"{where} is a PRNG key without key_impl")
    if leaf.alias_of is not None:
        if leaf.alias_of >= leaf.index or leaves[leaf.alias_of].encoding == "alias":
            raise InvalidManifest(
                f"{where}.alias_of is {leaf.alias_of}; it must be an earlier leaf that has bytes"
            )
        if leaves[leaf.alias_of].array_nbytes != leaf.array_nbytes:
            raise InvalidManifest(f"{where} and leaves[{leaf.alias_of}], which it repeats, differ in size")
