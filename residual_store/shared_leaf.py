"""Shared leaves: leaves that a run holds once, named by their content, however many of its bundles have them."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Annotated, Self

import msgspec

from residual_store.bundle import Bundle, Payload
from residual_store.digest import digest_of
from residual_store.dtypes import DTYPES
from residual_store.errors import InvalidOption
from residual_store.leaf import Leaf
from residual_store.manifest import Manifest

__all__ = ["SharedLeaf", "is_shared_key", "shared_keys", "with_shared"]

_FOLDER = "~shared"
"""No segment of a key can start so, so no caller reaches what lies below."""

type _Digest = Annotated[str, msgspec.Meta(pattern=r"\A[0-9a-f]{32}\Z")]
type _Size = Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)]


class SharedLeaf(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The name of a leaf by its content: the xxh3-128 of its raw bytes in hexadecimal, its dtype and its shape.

    Of a tiled leaf it is the tile that is shared, so it is one with a raw leaf that has the bytes of the tile.

    >>> SharedLeaf(digest="0" * 32, dtype="float32", shape=(2, 3)).key("exp1")
    'exp1/~shared/00000000000000000000000000000000-817b67d34d50b902'
    """

    digest: _Digest
    dtype: Annotated[str, msgspec.Meta(max_length=64)]
    shape: Annotated[tuple[_Size, ...], msgspec.Meta(max_length=32)]

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise InvalidOption(f"there is no dtype {self.dtype[:64]!r}", option="dtype")

    @classmethod
    def of(cls, leaf: Leaf) -> Self:
        """The name of a leaf that is raw, tiled or shared, and has its digest."""
        assert leaf.is_sealed, "all leaves of one shape would have one name"
        return cls(digest=leaf.digest.hex(), dtype=leaf.dtype, shape=leaf.tile_shape)

    def key(self, run: str) -> str:
        """The key of the bundle of one leaf that holds the bytes for a run."""
        kind = digest_of(f"{self.dtype}{list(self.shape)}".encode()).hex()[:16]
        return f"{run}/{_FOLDER}/{self.digest}-{kind}"

    def bundle(self, payload: Payload) -> Bundle:
        """The bundle of one leaf with these bytes, which are not looked at."""
        leaf = Leaf(
            index=0,
            channel="opaque_residuals",
            path="shared",
            dtype=self.dtype,
            shape=self.shape,
            nbytes=payload.nbytes,
            digest=bytes.fromhex(self.digest),
        )
        return Bundle(manifest=Manifest(leaves=(leaf,), created=time.time()), payloads=(payload,))


def is_shared_key(key: str) -> bool:
    """Whether a key is that of a shared leaf."""
    return f"/{_FOLDER}/" in key


def shared_keys(run: str, manifest: Manifest) -> tuple[str, ...]:
    """The keys of the leaves that a bundle shares, in their order."""
    return tuple(SharedLeaf.of(leaf).key(run) for leaf in manifest.shared)


def with_shared(bundle: Bundle, held: Iterable[int]) -> Bundle:
    """The bundle without the bytes of the large leaves with these indices, which its run ``held`` already."""
    leaves, payloads = list(bundle.manifest.leaves), list(bundle.payloads)
    for index in held:
        leaves[index] = leaves[index].as_shared()
        payloads[index] = payloads[index][:0]
    return Bundle(manifest=bundle.manifest.laid_out(leaves), payloads=tuple(payloads))
