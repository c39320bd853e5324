"""The record of a bundle on disk: what stands beside its leaves in its database."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import msgpack

from residual_store.bundle import digest_of
from residual_store.errors import InvalidManifest
from residual_store.leaf import Leaf
from residual_store.manifest import Manifest, decode, encode
from residual_store.settings import Settings

__all__ = ["Record"]

_MARK = b"RSR1"


@dataclass(frozen=True, kw_only=True)
class Record:
    """The manifest, when the bundle arrived, its lease in seconds, and how it is laid out.

    Leaves with fewer than ``packed_below`` bytes share one array.
    """

    manifest: Manifest
    arrived: float
    ttl: float | None
    packed_below: int

    @cached_property
    def packed(self) -> tuple[Leaf, ...]:
        """The leaves of the packed array, in its order."""
        return tuple(leaf for leaf in self.manifest.leaves if 0 < leaf.nbytes < self.packed_below)

    @cached_property
    def large(self) -> tuple[Leaf, ...]:
        """The leaves that have arrays of their own."""
        return tuple(leaf for leaf in self.manifest.leaves if 0 < self.packed_below <= leaf.nbytes)

    def is_shorter(self, ttl: float | None) -> bool:
        """Whether its lease is shorter than one of ``ttl`` seconds, None for one without end."""
        return self.ttl is not None and (ttl is None or self.ttl < ttl)

    def pack(self) -> bytes:
        """As bytes, with a digest."""
        content: bytes = msgpack.packb(
            {
                "manifest": encode(self.manifest),
                "arrived": self.arrived,
                "ttl": self.ttl,
                "packed_below": self.packed_below,
            }
        )
        return _MARK + digest_of(content) + content

    @classmethod
    def unpack(cls, data: bytes, settings: Settings) -> Record:
        """From bytes; raises `InvalidManifest`, KeyError, TypeError or ValueError if they are damaged."""
        if data[:4] != _MARK or digest_of(data[20:]) != data[4:20]:
            raise InvalidManifest("the record does not match its digest")
        content = msgpack.unpackb(data[20:])
        return cls(
            manifest=decode(content["manifest"], settings),
            arrived=content["arrived"],
            ttl=content["ttl"],
            packed_below=content["packed_below"],
        )
