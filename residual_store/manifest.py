"""The manifest: everything about a bundle but the bytes of its leaves.

It is one msgpack map, read by `decode` with every check of the format page and written by `encode`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import Any, Literal, Protocol, Self, cast

import msgpack
import msgspec

from residual_store.digest import DIGEST_BYTES
from residual_store.errors import InvalidManifest, InvalidOption
from residual_store.fields import Fields, unpack
from residual_store.layout import check_layout, offsets_of
from residual_store.leaf import Aval, Entry, Leaf
from residual_store.settings import Settings
from residual_store.tree import leaf_count

__all__ = [
    "FORMAT",
    "Argument",
    "Aval",
    "Leaf",
    "Manifest",
    "State",
    "UserValue",
    "decode",
    "encode",
    "labels",
]

FORMAT = 1
"""The format version that this release writes and the only one that it reads."""

type State = Literal["saved", "not_needed", "not_saveable"]
type UserValue = str | int | float | bool

_LABELS = (str, bool, int, float)
_STATES = ("saved", "not_needed", "not_saveable")


class Argument(Entry, frozen=True, kw_only=True):
    """One leaf of the argument tree: its path, its state, and what must be given back at restore.

    ``needed`` says whether the backward reads it: of two arguments that are one array, JAX reads only the last.
    ``aval`` is that of the argument, or of its gradient where JAX recorded only that.
    ``digest`` is the xxh3-128 of the argument's bytes where the caller asked that the restore checks them.
    """

    path: str
    state: State
    needed: bool = True
    aval: Aval | None = None
    digest: bytes | None = None

    @property
    def must_be_restored(self) -> bool:
        """Whether the backward cannot run until this argument is given back."""
        return self.state == "not_saveable" and self.needed

    @classmethod
    def all_fit(cls, entries: Sequence[Self], settings: Settings) -> bool:
        return (
            all(len(argument.path) <= settings.max_path_chars for argument in entries)
            and {len(argument.digest) for argument in entries if argument.digest is not None}
            <= {DIGEST_BYTES}
            and Aval.all_fit([argument.aval for argument in entries if argument.aval is not None], settings)
        )

    @classmethod
    def read(cls, entry: Fields, settings: Settings) -> Self:
        return cls(
            path=entry.text("path", settings.max_path_chars),
            state=cast("State", entry.choice("state", _STATES)),
            needed=entry.flag("needed"),
            aval=entry.optional("aval", lambda inner: Aval.read(inner, settings)),
            digest=entry.optional_binary("digest", 16),
        )


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """What a bundle says of itself.

    ``key`` is the one that the bundle was stored under, if its writer said so.
    ``fingerprint`` names the backward program; it is None for a scratch bundle, which only the process that made it
    can restore.
    ``in_tree`` and ``out_tree`` describe the argument and output trees, node by node in preorder.
    ``program`` is the xxh3-128 of the exported backward, ``platforms`` says where that runs, and ``no_program`` why there
    is none, if so.
    """

    format: int = FORMAT
    key: str | None = None
    fingerprint: str | None = None
    program: bytes | None = None
    platforms: tuple[str, ...] = ()
    no_program: str | None = None
    versions: Mapping[str, str] = field(default_factory=dict)
    x64: bool = False
    function: str = ""
    created: float = 0.0
    leaves: tuple[Leaf, ...] = ()
    arguments: tuple[Argument, ...] = ()
    cotangents: tuple[Aval, ...] = ()
    in_tree: tuple[Any, ...] = ()
    out_tree: tuple[Any, ...] = ()
    user: Mapping[str, UserValue] = field(default_factory=dict)

    @cached_property
    def packed(self) -> bytes:
        """The msgpack map of this manifest; `decode` is the inverse."""
        return _pack(self)

    @cached_property
    def nbytes(self) -> int:
        """Length of the leaf area, from the start of the first leaf to the end of the last one."""
        return next((leaf.offset + leaf.nbytes for leaf in reversed(self.leaves) if leaf.nbytes), 0)

    @cached_property
    def array_nbytes(self) -> int:
        """Bytes of all leaves as arrays on the host."""
        return sum([leaf.array_nbytes for leaf in self.leaves])

    @cached_property
    def shared(self) -> tuple[Leaf, ...]:
        """The leaves whose bytes are held once for the run."""
        return tuple(leaf for leaf in self.leaves if leaf.is_shared)

    @cached_property
    def resolved(self) -> Manifest:
        """The manifest that the bundle has when all its leaves are its own: what a reader sees, and what names the bundle."""
        if not self.shared:
            return self
        return self.laid_out([leaf.as_own() for leaf in self.leaves])

    def laid_out(self, leaves: Sequence[Leaf]) -> Manifest:
        """The same with other leaves, whose lengths and offsets follow from their encodings."""
        lengths = [leaf.encoded_nbytes for leaf in leaves]
        placed = [
            leaf.changed(offset=offset, nbytes=nbytes)
            for leaf, offset, nbytes in zip(leaves, offsets_of(lengths), lengths, strict=True)
        ]
        return replace(self, leaves=tuple(placed))

    def source(self, index: int) -> Leaf:
        """The leaf that has the bytes of leaf ``index``: itself, or the one that it repeats; raises IndexError."""
        leaf = self.leaves[index]
        return leaf if leaf.alias_of is None else self.leaves[leaf.alias_of]


def encode(manifest: Manifest) -> bytes:
    """The msgpack map of a manifest; `decode` is its inverse.

    >>> decode(encode(Manifest(function="f")), Settings()).function
    'f'
    """
    return manifest.packed


def _pack(manifest: Manifest) -> bytes:
    packer = msgpack.Packer(default=_refuse)
    try:
        return _map(packer, {name: _packed(packer, name, getattr(manifest, name)) for name in _NAMES})
    except (TypeError, OverflowError, ValueError) as error:
        raise InvalidManifest(f"the manifest holds what msgpack cannot write: {error}") from error


def _packed(packer: msgpack.Packer, name: str, value: object) -> bytes:
    if name in _ENTRIES:
        return msgspec.msgpack.encode(value, enc_hook=_refuse)
    packed: bytes = packer.pack(value)
    return packed


def _refuse(part: object) -> Any:
    raise InvalidManifest(f"a {type(part).__name__} cannot stand in a manifest: {ascii(part)[:60]}")


def _map(packer: msgpack.Packer, packed: Mapping[str, bytes | msgspec.Raw]) -> bytes:
    """The msgpack map of values that are packed already."""
    parts = [packer.pack_map_header(len(packed))]
    for name, value in packed.items():
        parts += packer.pack(name), value
    return b"".join(parts)


def labels(user: Mapping[str, Any] | None, settings: Settings) -> dict[str, UserValue]:
    """User metadata as it goes into a manifest, numpy scalars as Python's; raises `InvalidOption`.

    >>> labels({"step": 3}, Settings())
    {'step': 3}
    """
    plain = {key: value.item() if hasattr(value, "item") else value for key, value in (user or {}).items()}
    try:
        Fields({"user": dict(plain)}, "").scalars(
            "user", settings.max_user_entries, settings.max_user_chars, *_LABELS
        )
    except InvalidManifest as error:
        raise InvalidOption(
            f"{error.detail}; labels are small: numbers, texts and flags by name", option="user"
        ) from None
    return plain


def decode(data: bytes, settings: Settings) -> Manifest:
    """The manifest in ``data``; raises `InvalidManifest` and names the place that breaks a rule.

    What comes out as it went in was written by `encode`; anything else is read again, field by field.
    """
    with contextlib.suppress(InvalidManifest, msgspec.MsgspecError, ValueError, RecursionError):
        manifest = decode_as_written(data, settings)
        if manifest.packed == data:
            return manifest
    entry = unpack(data, settings)

    def each[T: Entry](name: str, kind: type[T], most: int) -> tuple[T, ...]:
        return entry.each(name, most, lambda inner: kind.read(inner, settings))

    return _read(entry, each, settings)


def decode_as_written(data: bytes, settings: Settings) -> Manifest:
    """The manifest in ``data`` if `encode` wrote it, its entries read by msgspec.

    It has no eye for keys that stand twice, so what is read counts only if it is packed to ``data`` again.
    """
    wire = _DECODER.decode(data)
    rest = {name: getattr(wire, name) for name in _NAMES if name not in _ENTRIES}

    def each[T: Entry](name: str, kind: type[T], most: int) -> tuple[T, ...]:
        entries: tuple[T, ...] = getattr(wire, name)
        if len(entries) > most or not kind.all_fit(entries, settings):
            raise InvalidManifest(f"{name} is beyond a limit")
        return entries

    return _read(unpack(_map(msgpack.Packer(), rest), settings), each, settings)


class _Each(Protocol):
    """Reads a list of entries of one ``kind``, ``most`` at most."""

    def __call__[T: Entry](self, name: str, kind: type[T], most: int) -> tuple[T, ...]: ...


def _read(entry: Fields, each: _Each, settings: Settings) -> Manifest:
    version = entry.integer("format", 0, 1 << 31)
    if version != FORMAT:
        raise InvalidManifest(
            f"the manifest has format version {version} and this release reads version {FORMAT}; "
            f"use the release of residual-store that wrote it"
        )
    manifest = Manifest(
        key=entry.optional_text("key", settings.max_key_chars),
        fingerprint=entry.optional_text("fingerprint", 128),
        program=entry.optional_binary("program", 16),
        platforms=entry.names("platforms", 16, 32),
        no_program=entry.optional_text("no_program", settings.max_user_chars),
        versions=entry.scalars("versions", 16, 128, str),
        x64=entry.flag("x64"),
        function=entry.text("function", settings.max_path_chars),
        created=entry.number("created"),
        leaves=each("leaves", Leaf, settings.max_leaves),
        arguments=each("arguments", Argument, settings.max_tree_nodes),
        cotangents=each("cotangents", Aval, settings.max_tree_nodes),
        in_tree=entry.tree("in_tree", settings.max_tree_nodes),
        out_tree=entry.tree("out_tree", settings.max_tree_nodes),
        user=entry.scalars("user", settings.max_user_entries, settings.max_user_chars, *_LABELS),
    )
    entry.finish()
    check_layout(manifest.leaves)
    _check_leaf_counts(manifest)
    return manifest


def _check_leaf_counts(manifest: Manifest) -> None:
    trees = {"arguments": manifest.in_tree, "cotangents": manifest.out_tree}
    for name, nodes in trees.items():
        count = len(getattr(manifest, name))
        if leaf_count(nodes) != count:
            raise InvalidManifest(f"{name} has {count} entries and its tree has {leaf_count(nodes)} leaves")


_ENTRIES = {"leaves": tuple[Leaf, ...], "arguments": tuple[Argument, ...], "cotangents": tuple[Aval, ...]}
_NAMES = [entry.name for entry in fields(Manifest)]
_DECODER = msgspec.msgpack.Decoder(
    msgspec.defstruct(
        "Wire", [(name, _ENTRIES.get(name, msgspec.Raw)) for name in _NAMES], forbid_unknown_fields=True
    )
)
"""Reads the entries, and leaves the other fields packed."""
