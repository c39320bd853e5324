"""Parts: what each of several processes stores of one bundle, and how the parts become that bundle.

A part is a bundle itself: its first leaf holds the manifest of the whole and says which piece of which leaf the others are.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Self

import msgspec
import numpy as np
import numpy.typing as npt

from residual_store.blocks import Blocks, Start
from residual_store.bundle import Bundle, Payload
from residual_store.digest import NO_DIGEST
from residual_store.dtypes import DTYPES, name_of
from residual_store.errors import InvalidManifest, InvalidOption
from residual_store.layout import offsets_of
from residual_store.leaf import Leaf
from residual_store.manifest import Manifest, decode, encode
from residual_store.settings import Settings

__all__ = ["ATTEMPT", "Part", "Piece", "attempt_of", "difference", "join", "part_bundle", "whole_of"]

type Host = npt.NDArray[np.generic]

ATTEMPT = "residual-store.attempt"
"""The label that is equal in the parts of one offload, and in no others."""

MOST_PARTS = 65_536
_DESCRIPTION = "part"
_PATH_CHARS = 1024


@dataclass(frozen=True, kw_only=True)
class Part:
    """Which part of how many.

    >>> Part.of_text("0/2")
    Part(index=0, count=2)
    """

    index: int
    count: int

    @classmethod
    def of_text(cls, text: str) -> Self:
        """The part that ``index/count`` names; raises `InvalidOption`."""
        found = re.fullmatch(r"(\d{1,6})/(\d{1,6})", text)
        if found is None:
            raise InvalidOption(f"part is {text[:40]!r}; it must be index/count, such as 0/2", option="part")
        return cls(index=int(found[1]), count=int(found[2])).checked()

    def checked(self) -> Self:
        """The part itself; raises `InvalidOption` if there is no such part."""
        if not 0 <= self.index < self.count <= MOST_PARTS:
            raise InvalidOption(
                f"part is {self}; the index is below the count, and the count at most {MOST_PARTS}",
                option="part",
            )
        return self

    def __str__(self) -> str:
        return f"{self.index}/{self.count}"


@dataclass(frozen=True, kw_only=True)
class Piece:
    """A block of one leaf: the index of the leaf, where in each dimension the block starts, and its values."""

    leaf: int
    start: Start
    values: Host


class _Description(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The first leaf of a part: the packed manifest of the whole, and for each other leaf its leaf there and its start."""

    manifest: bytes
    pieces: tuple[tuple[int, tuple[int, ...]], ...]


def attempt_of(manifest: Manifest) -> str | None:
    """The label of the offload that a bundle came from in parts; None for one that came whole."""
    attempt = manifest.user.get(ATTEMPT)
    return attempt if isinstance(attempt, str) else None


def part_bundle(whole: Manifest, pieces: Sequence[Piece], *, identities: Sequence[int]) -> Bundle:
    """The part of ``whole`` that has these pieces, whose bytes are not copied.

    ``whole`` says of its leaves what they are; ``identities`` has equal numbers where two of them are one array, whose
    pieces are then wanted once.

    >>> manifest = Bundle.of_arrays({"h": np.zeros(4)}).manifest
    >>> part = part_bundle(manifest, [Piece(leaf=0, start=(2,), values=np.ones(2))], identities=[0])
    >>> [leaf.path for leaf in part.manifest.leaves]
    ['part', 'h[2:4]']
    """
    whole = _laid_out(whole, _repeated(whole.leaves, identities))
    placed = tuple((piece.leaf, piece.start) for piece in pieces)
    packed = msgspec.msgpack.encode(_Description(encode(whole), placed))
    description = Leaf(
        index=0, channel="opaque_residuals", path=_DESCRIPTION, dtype="uint8", shape=(len(packed),)
    )
    leaves = [description, *(_leaf_of(index, whole, piece) for index, piece in enumerate(pieces, 1))]
    manifest = Manifest(key=whole.key, leaves=tuple(leaves), created=whole.created, user=whole.user)
    hosts: list[Host] = [np.frombuffer(packed, np.uint8), *(piece.values for piece in pieces)]
    return Bundle.encoded(manifest, hosts, identities=list(map(id, hosts)))


def _repeated(leaves: Sequence[Leaf], identities: Sequence[int]) -> list[Leaf]:
    first_of: dict[int, int] = {}
    found = []
    for leaf, identity in zip(leaves, identities, strict=True):
        source = first_of.setdefault(identity, leaf.index)
        alias = source != leaf.index and leaf.array_nbytes > 0
        found.append(
            leaf.changed(encoding="alias", alias_of=source, same_array=True)
            if alias
            else leaf.changed(encoding="raw", alias_of=None, same_array=False)
        )
    return found


def _laid_out(manifest: Manifest, leaves: Sequence[Leaf]) -> Manifest:
    """The manifest with these leaves, their lengths and places as their encodings want them."""
    lengths = [leaf.encoded_nbytes for leaf in leaves]
    placed = [
        leaf.changed(nbytes=nbytes, offset=offset, digest=NO_DIGEST)
        for leaf, nbytes, offset in zip(leaves, lengths, offsets_of(lengths), strict=True)
    ]
    return replace(manifest, leaves=tuple(placed))


def _leaf_of(index: int, whole: Manifest, piece: Piece) -> Leaf:
    leaf, shape = whole.leaves[piece.leaf], piece.values.shape
    block = ",".join(f"{start}:{start + size}" for start, size in zip(piece.start, shape, strict=True))
    return Leaf(
        index=index,
        channel=leaf.channel,
        path=f"{leaf.path[-_PATH_CHARS:]}[{block}]",
        dtype=name_of(piece.values.dtype),
        shape=shape,
    )


def whole_of(description: Host, settings: Settings) -> Manifest:
    """The manifest of the whole in the first leaf of a part; raises `InvalidManifest`."""
    if description.nbytes > settings.max_manifest_bytes:
        raise InvalidManifest(
            f"the description of a part has {description.nbytes} bytes; "
            f"the limit max_manifest_bytes is {settings.max_manifest_bytes}"
        )
    whole = decode(_read(description).manifest, settings)
    for leaf in whole.leaves:
        if leaf.encoding not in ("raw", "alias"):
            raise InvalidManifest(
                f"{leaf.path} is {leaf.encoding} in the description of a part; how a leaf is encoded is known once all are there"
            )
    return whole


def _read(description: Host) -> _Description:
    try:
        return msgspec.msgpack.decode(description.tobytes(), type=_Description)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise InvalidManifest(f"the first leaf of a part is no description of the whole: {error}") from error


def difference(one: Manifest, other: Manifest) -> str | None:
    """The first thing in which the wholes of two parts differ, in words, or None; they may be made at different moments."""
    for name in (entry.name for entry in fields(Manifest) if entry.name != "created"):
        mine, others = getattr(one, name), getattr(other, name)
        if mine != others:
            return _difference(name, mine, others)
    return None


def _difference(name: str, one: Any, other: Any) -> str:
    if isinstance(one, tuple) and len(one) == len(other):
        index = next(index for index in range(len(one)) if one[index] != other[index])
        return _difference(f"{name}[{index}]", one[index], other[index])
    if isinstance(one, tuple):
        return f"{name} has {len(other)} entries there and {len(one)} here"
    if isinstance(one, Leaf) and isinstance(other, Leaf):
        field = next(field for field in one.__struct_fields__ if getattr(one, field) != getattr(other, field))
        return f"{one.path}: " + _difference(f"{name}.{field}", getattr(one, field), getattr(other, field))
    return f"{name} is {str(other)[:200]} there and {str(one)[:200]} here"


def join(parts: Sequence[Bundle], settings: Settings, allocate: Callable[[int], Payload]) -> Bundle:
    """The whole bundle of all its parts, in memory from ``allocate``.

    A block that came twice must have the same bytes twice.
    Raises `InvalidManifest`, which names the leaf, if the pieces do not tile every leaf.
    """
    whole = whole_of(parts[0].array(0), settings)
    wholes = [
        Blocks(dtype=DTYPES[leaf.dtype], shape=leaf.shape, blocks=blocks)
        for leaf, blocks in zip(whole.leaves, _blocks_of(parts, whole), strict=True)
    ]
    whole = _laid_out(whole, list(map(_encoded, whole.leaves, wholes)))
    segment = allocate(whole.nbytes)
    end = 0
    for leaf, found in zip(whole.leaves, wholes, strict=True):
        if leaf.nbytes:
            segment[end : leaf.offset] = 0
            end = leaf.offset + leaf.nbytes
            _fill(segment[leaf.offset : end], leaf, found)
    return Bundle.of_area(whole, segment).sealed()


def _blocks_of(parts: Sequence[Bundle], whole: Manifest) -> list[dict[Start, Host]]:
    """The blocks of each leaf by their start."""
    blocks: list[dict[Start, Host]] = [{} for _ in whole.leaves]
    for part in parts:
        for index, (leaf, start) in enumerate(_read(part.array(0)).pieces, 1):
            if not 0 <= leaf < len(blocks) or index >= len(part.manifest.leaves):
                raise InvalidManifest(f"a part has a piece {index} of leaf {leaf}, and there is no such one")
            _collect(blocks[leaf], whole.leaves[leaf], start, part.array(index))
    return blocks


def _collect(blocks: dict[Start, Host], leaf: Leaf, start: Start, values: Host) -> None:
    if name_of(values.dtype) != leaf.dtype or values.ndim != len(leaf.shape) or len(start) != values.ndim:
        raise InvalidManifest(
            f"a piece of {leaf.path} is {values.dtype}{list(values.shape)} at {list(start)}"
        )
    known = blocks.setdefault(start, values)
    if known is not values and not _are_equal(known, values):
        raise InvalidManifest(
            f"{leaf.path} differs between the processes; only a leaf that is one array over all of them, or equal in "
            "each, can be stored in parts"
        )


def _are_equal(one: Host, other: Host) -> bool:
    """Whether two blocks have the same bytes; constants, which come as one element that is broadcast, are not made whole."""
    if one.shape == other.shape and one.size > 1 and not any((*one.strides, *other.strides)):
        origin = (slice(1),) * one.ndim
        one, other = one[origin], other[origin]
    return one.shape == other.shape and _bytes(one) == _bytes(other)


def _bytes(values: Host) -> memoryview:
    return memoryview(np.ascontiguousarray(values).reshape(-1).view(np.uint8))


def _encoded(leaf: Leaf, blocks: Blocks) -> Leaf:
    """The leaf, as a constant if all of its blocks are one; raises `InvalidManifest` unless they cover it."""
    if leaf.encoding == "alias" or not leaf.array_nbytes:
        return leaf
    if not blocks.are_tiles():
        raise InvalidManifest(
            f"the parts do not cover {leaf.path}, which is {leaf.dtype}{list(leaf.shape)}: they have blocks at "
            f"{', '.join(str(list(start)) for start in list(blocks.blocks)[:8])}"
        )
    return leaf.changed(encoding="constant") if leaf.elements > 1 and blocks.constant() is not None else leaf


def _fill(target: Payload, leaf: Leaf, blocks: Blocks) -> None:
    element = blocks.constant() if leaf.encoding == "constant" else None
    if element is None:
        blocks.fill(target)
    else:
        target[:] = element
