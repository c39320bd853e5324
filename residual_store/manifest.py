"""The manifest: everything about a bundle but the bytes of its leaves.

It is one msgpack map, read by `decode` with every check of the format page and written by `encode`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import Any, Literal, cast

import msgpack

from residual_store.canonical import guessed_leaves
from residual_store.errors import InvalidManifest, InvalidOption
from residual_store.fields import Fields, unpack
from residual_store.layout import check_layout
from residual_store.leaf import Aval, Leaf, MeshSharding
from residual_store.settings import Settings
from residual_store.tree import leaf_count

__all__ = [
    "FORMAT",
    "Argument",
    "Aval",
    "Leaf",
    "Manifest",
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


@dataclass(frozen=True, kw_only=True)
class Argument:
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
    def read(cls, entry: Fields, settings: Settings) -> Argument:
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
        return max((leaf.offset + leaf.nbytes for leaf in self.leaves), default=0)

    @cached_property
    def array_nbytes(self) -> int:
        """Bytes of all leaves as arrays on the host."""
        return sum(leaf.array_nbytes for leaf in self.leaves)

    def source(self, index: int) -> Leaf:
        """The leaf that has the bytes of leaf ``index``: itself, or the one that it repeats; raises IndexError."""
        leaf = self.leaves[index]
        return leaf if leaf.alias_of is None else self.leaves[leaf.alias_of]


def _pack(manifest: Manifest) -> bytes:
    content = {entry.name: getattr(manifest, entry.name) for entry in fields(manifest)}
    try:
        packed: bytes = msgpack.packb(content, use_bin_type=True, default=_content)
    except (TypeError, OverflowError, ValueError) as error:
        raise InvalidManifest(f"the manifest holds what msgpack cannot write: {error}") from error
    return packed


def encode(manifest: Manifest) -> bytes:
    """The msgpack map of a manifest; `decode` is its inverse.

    >>> decode(encode(Manifest(function="f")), Settings()).function
    'f'
    """
    return manifest.packed


def _content(part: object) -> dict[str, Any]:
    if isinstance(part, Leaf | Argument | Aval | MeshSharding):
        return vars(part)
    raise InvalidManifest(f"a {type(part).__name__} cannot stand in a manifest: {ascii(part)[:60]}")


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

    What `encode` wrote comes out as it went in, and is proved right by that; anything else is read field by field.
    """
    with contextlib.suppress(InvalidManifest, TypeError, ValueError, AttributeError):
        entry = unpack(data, settings, keys_once=False)
        leaves = guessed_leaves(entry.maps("leaves", settings.max_leaves), settings)
        guess = _read(entry, settings, lambda: leaves)
        if guess.packed == data:
            return guess
    entry = unpack(data, settings)
    manifest = _read(
        entry,
        settings,
        lambda: entry.each("leaves", settings.max_leaves, lambda leaf: Leaf.read(leaf, settings)),
    )
    check_layout(manifest.leaves)
    return manifest


def _read(entry: Fields, settings: Settings, leaves: Callable[[], tuple[Leaf, ...]]) -> Manifest:
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
        leaves=leaves(),
        arguments=entry.each("arguments", settings.max_tree_nodes, lambda one: Argument.read(one, settings)),
        cotangents=entry.each("cotangents", settings.max_tree_nodes, lambda aval: Aval.read(aval, settings)),
        in_tree=entry.tree("in_tree", settings.max_tree_nodes),
        out_tree=entry.tree("out_tree", settings.max_tree_nodes),
        user=entry.scalars("user", settings.max_user_entries, settings.max_user_chars, *_LABELS),
    )
    entry.finish()
    _check_leaf_counts(manifest)
    return manifest


def _check_leaf_counts(manifest: Manifest) -> None:
    trees = {"arguments": manifest.in_tree, "cotangents": manifest.out_tree}
    for name, nodes in trees.items():
        count = len(getattr(manifest, name))
        if leaf_count(nodes) != count:
            raise InvalidManifest(f"{name} has {count} entries and its tree has {leaf_count(nodes)} leaves")
