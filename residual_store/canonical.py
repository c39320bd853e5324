"""Reading the leaves of a manifest by a guess that is proved when they are packed again.

Most leaves of a bundle differ in index, path, offset and digest alone.
So each kind of leaf is read field by field once; of the others these four are set, and the rest is taken over.
A leaf for which that was wrong packs to other bytes than it came in, so the guess costs no check of its own.
"""

from __future__ import annotations

from typing import Any

from residual_store.errors import InvalidManifest
from residual_store.fields import Fields
from residual_store.layout import ALIGNMENT, check_encoding
from residual_store.leaf import Leaf
from residual_store.settings import Settings

__all__ = ["guessed_leaves"]


def guessed_leaves(entries: list[dict[str, Any]], settings: Settings) -> tuple[Leaf, ...]:
    """The leaves of ``entries`` if these are as `encode` writes them.

    Raises `InvalidManifest`, TypeError, ValueError or AttributeError if they cannot be.
    """
    kinds: dict[tuple[Any, ...], dict[str, Any]] = {}
    leaves: list[Leaf] = []
    end = 0
    for index, entry in enumerate(entries):
        _, channel, path, kind, dtype, shape, encoding, *_, digest, _, weak, committed, memory, mesh, impl = (
            entry.values()
        )
        if type(path) is not str or type(digest) is not bytes:
            raise InvalidManifest("it is for the precise reader to say so")
        if len(path) > settings.max_path_chars or len(digest) != 16:
            raise InvalidManifest("it is for the precise reader to say so")
        name = (channel, kind, dtype, tuple(shape), encoding, weak, committed, memory, mesh is None, impl)
        known = kinds.get(name)
        if known is None:
            leaf = _read(index, dict(entry), leaves, settings)
            known = vars(leaf)
            if leaf.alias_of is None and leaf.sharding is None:
                kinds[name] = known
        nbytes = known["nbytes"]
        offset = -(-end // ALIGNMENT) * ALIGNMENT if nbytes else 0
        end = offset + nbytes or end
        leaves.append(
            Leaf.of_fields(known | {"index": index, "path": path, "offset": offset, "digest": digest})
        )
    return tuple(leaves)


def _read(index: int, entry: dict[str, Any], leaves: list[Leaf], settings: Settings) -> Leaf:
    fields = Fields(entry, "")
    leaf = Leaf.read(fields, settings)
    fields.finish()
    leaf = leaf.changed(index=index, nbytes=leaf.encoded_nbytes)
    check_encoding(leaf, leaves)
    return leaf
