"""What a store derives from a manifest without reading any leaf."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from residual_store.bundle import digest_of
from residual_store.leaf import Leaf
from residual_store.manifest import Manifest, encode
from residual_store.store import Receipt, Stat, Tier

__all__ = ["digest_of_manifest", "receipt_of", "saved_bytes", "stat_of"]


def digest_of_manifest(manifest: Manifest) -> str:
    """A name of one put: the xxh3-128 of the manifest, which holds the digest of every leaf.

    It is the same whether leaves are shared or not.
    """
    return digest_of(encode(manifest.resolved)).hex()


def content_digest(manifest: Manifest) -> str:
    """A name of the values and the program, whenever and by whatever release they were stored."""
    arguments = [(argument.path, argument.digest) for argument in manifest.arguments]
    leaves = [
        (leaf.channel, leaf.path, leaf.dtype, leaf.shape, leaf.encoding, leaf.alias_of, leaf.digest)
        for leaf in manifest.resolved.leaves
    ]
    return digest_of(msgspec.msgpack.encode((manifest.fingerprint, arguments, leaves))).hex()


def stat_of(key: str, manifest: Manifest, *, tier: Tier, arrived: float, expires_at: float | None) -> Stat:
    """The `Stat` of a bundle with this manifest."""
    return Stat(
        key=key,
        tier=tier,
        durability="host" if tier == "host" else "disk",
        fingerprint=manifest.fingerprint,
        leaves=len(manifest.leaves),
        nbytes=manifest.nbytes,
        array_nbytes=manifest.array_nbytes,
        arrived=arrived,
        expires_at=expires_at,
        digest=digest_of_manifest(manifest),
        content=content_digest(manifest),
    )


def saved_bytes(leaves: Iterable[Leaf]) -> dict[str, int]:
    """How many bytes less these leaves have than the arrays, by encoding; of a shared tile it is both, each with its share."""
    saved: dict[str, int] = {}
    for leaf in leaves:
        if leaf.encoding == "raw":
            continue
        own = leaf.as_own()
        if own.encoding != "raw":
            saved[own.encoding] = saved.get(own.encoding, 0) + own.array_nbytes - own.encoded_nbytes
        if leaf.is_shared:
            saved["shared"] = saved.get("shared", 0) + own.encoded_nbytes
    return saved


def receipt_of(
    stat: Stat, manifest: Manifest, *, existed: bool, has_program: bool, seconds: dict[str, float]
) -> Receipt:
    """The `Receipt` for a bundle that is stored as ``stat`` says."""
    return Receipt(
        key=stat.key,
        leaves=stat.leaves,
        array_nbytes=stat.array_nbytes,
        nbytes=stat.nbytes,
        tier=stat.tier,
        durability=stat.durability,
        digest=stat.digest,
        existed=existed,
        has_program=has_program,
        saved_bytes=saved_bytes(manifest.leaves),
        fingerprint=stat.fingerprint,
        platforms=manifest.platforms,
        no_program=manifest.no_program,
        seconds=seconds,
    )
