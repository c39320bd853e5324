"""A leaf: one residual array of a VJP object, as the manifest describes it."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from typing import Any, Literal, Self, cast

import msgspec

from residual_store import dtypes
from residual_store.digest import DIGEST_BYTES, NO_DIGEST
from residual_store.errors import InvalidManifest
from residual_store.fields import Fields, is_shape
from residual_store.settings import Settings

__all__ = ["Aval", "Channel", "Encoding", "Entry", "Leaf", "MeshSharding"]

type Encoding = Literal["raw", "constant", "bits", "tiled", "alias", "shared", "shared_tile"]
type Channel = Literal["args_res", "opaque_residuals", "structured_residuals"]
type Kind = Literal["array", "key"]

_ENCODINGS = ("raw", "constant", "bits", "tiled", "alias", "shared", "shared_tile")
_SHARED: dict[Encoding, Encoding] = {"raw": "shared", "tiled": "shared_tile"}
_OWN: dict[Encoding, Encoding] = {shared: own for own, shared in _SHARED.items()}
_CHANNELS = ("args_res", "opaque_residuals", "structured_residuals")
_KINDS = ("array", "key")


class Entry(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, gc=False):
    """What stands in a manifest many times; msgspec makes, reads and writes it ten times as fast as a dataclass."""

    @classmethod
    def read(cls, entry: Fields, settings: Settings) -> Self:
        """Read one field by field; raises `InvalidManifest`, which names the field."""
        raise NotImplementedError

    @classmethod
    def all_fit(cls, entries: Sequence[Self], settings: Settings) -> bool:
        """Whether those that were read by msgspec, which looks at types alone, are within the limits that `read` knows."""
        raise NotImplementedError

    def changed(self, **changes: Any) -> Self:
        """The same with some fields changed."""
        return msgspec.structs.replace(self, **changes)


class Aval(Entry, frozen=True, kw_only=True):
    """Shape, dtype and weak type of an abstract value; the dtype by canonical name, or ``key<impl>`` for PRNG keys."""

    dtype: str
    shape: tuple[int, ...]
    weak_type: bool = False

    def __str__(self) -> str:
        return f"{self.dtype}[{','.join(map(str, self.shape))}]" + ("~" if self.weak_type else "")

    @property
    def elements(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @classmethod
    def all_fit(cls, entries: Sequence[Self], settings: Settings) -> bool:
        return _are_short({aval.dtype for aval in entries}) and _are_shapes(
            [aval.shape for aval in entries], settings
        )

    @classmethod
    def read(cls, entry: Fields, settings: Settings) -> Self:
        return cls(
            dtype=entry.text("dtype", 64),
            shape=entry.shape("shape", settings.max_rank),
            weak_type=entry.flag("weak_type"),
        )


class MeshSharding(Entry, frozen=True, kw_only=True):
    """How a leaf lay on a device mesh, in symbols: names, sizes and types of the axes and a partition spec, no device ids.

    ``spec`` has one entry per dimension, a list of axis names.
    """

    axis_names: tuple[str, ...]
    axis_sizes: tuple[int, ...]
    axis_types: tuple[str, ...]
    spec: tuple[tuple[str, ...], ...]

    def __str__(self) -> str:
        axes = ", ".join(
            f"{name}={size}" for name, size in zip(self.axis_names, self.axis_sizes, strict=True)
        )
        return f"mesh({axes}) spec({', '.join('+'.join(names) or '-' for names in self.spec)})"

    @property
    def devices(self) -> int:
        """Number of devices of the mesh."""
        return math.prod(self.axis_sizes)

    def parts_of(self, dimension: int) -> int:
        """Into how many equal parts a dimension is split; 1 for one that the spec does not name."""
        count = 1
        for name in self.spec[dimension] if dimension < len(self.spec) else ():
            if name in self.axis_names:
                count *= self.axis_sizes[self.axis_names.index(name)]
        return count

    @classmethod
    def all_fit(cls, entries: Sequence[Self], settings: Settings) -> bool:
        return all(sharding._fits(settings) for sharding in entries)

    def _fits(self, settings: Settings) -> bool:
        lists = [self.axis_names, self.axis_types, self.spec, *self.spec]
        return (
            max(map(len, lists)) <= settings.max_rank
            and is_shape(self.axis_sizes, settings.max_rank)
            and len(self.axis_names) == len(self.axis_sizes) == len(self.axis_types)
            and all(len(name) <= 64 for names in (self.axis_names, *self.spec) for name in names)
            and all(len(name) <= 16 for name in self.axis_types)
        )

    @classmethod
    def read(cls, entry: Fields, settings: Settings) -> Self:
        sharding = cls(
            axis_names=entry.names("axis_names", settings.max_rank, 64),
            axis_sizes=entry.shape("axis_sizes", settings.max_rank),
            axis_types=entry.names("axis_types", settings.max_rank, 16),
            spec=entry.lists_of_names("spec", settings.max_rank, 64),
        )
        if not len(sharding.axis_names) == len(sharding.axis_sizes) == len(sharding.axis_types):
            raise InvalidManifest("a sharding has axis_names, axis_sizes and axis_types of different lengths")
        return sharding


class Leaf(Entry, frozen=True, kw_only=True):
    """One residual array: where it sits in the VJP object, what it is, and where its bytes are.

    ``offset`` counts from the start of the leaf area, ``nbytes`` is the length after ``encoding``, and ``digest`` is
    the xxh3-128 of those bytes, `NO_DIGEST` until it is taken.
    A "shared" leaf has its bytes elsewhere, once for its run, under its digest, dtype and shape.
    A "tiled" leaf is its first shard again and again along dimension 0, and has the bytes of that one alone; a
    "shared_tile" has even those elsewhere.
    A typed PRNG key array (``kind`` "key") holds its key data: ``dtype`` and ``shape`` are those of the data and
    ``key_impl`` names the implementation.
    """

    index: int
    channel: Channel
    path: str
    kind: Kind = "array"
    dtype: str
    shape: tuple[int, ...]
    encoding: Encoding = "raw"
    alias_of: int | None = None
    same_array: bool = False
    offset: int = 0
    nbytes: int = 0
    digest: bytes = NO_DIGEST
    shards: tuple[()] = ()
    weak_type: bool = False
    committed: bool = False
    memory_kind: str | None = None
    sharding: MeshSharding | None = None
    key_impl: str | None = None

    @property
    def elements(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def is_sealed(self) -> bool:
        """Whether its digest is taken."""
        return self.digest != NO_DIGEST

    @property
    def is_shared(self) -> bool:
        """Whether the bytes are held once for the run and not in the bundle."""
        return self.encoding in _OWN

    def as_shared(self) -> Leaf:
        """A leaf that `is_large`, without its bytes."""
        return self.changed(encoding=_SHARED[self.encoding])

    def as_own(self) -> Leaf:
        """The leaf as it is when its bytes are in the bundle; offset and length are not looked at."""
        return self.changed(encoding=_OWN[self.encoding]) if self.is_shared else self

    def is_large(self, least: int) -> bool:
        """Whether it has bytes of its own, at least so many, which the run could hold for several bundles."""
        return self.encoding in _SHARED and self.nbytes >= max(least, 1)

    @property
    def tiles(self) -> int:
        """How many shards of one shape it has along dimension 0, by its sharding; 1 where that is none or does not go up."""
        if self.sharding is None or not self.shape:
            return 1
        count = self.sharding.parts_of(0)
        return count if count and not self.shape[0] % count else 1

    @property
    def is_tiled(self) -> bool:
        """Whether only the first of its `tiles` has bytes, here or in the run."""
        return self.encoding in ("tiled", "shared_tile")

    @property
    def tile_shape(self) -> tuple[int, ...]:
        """The shape of that tile; of a leaf that is not tiled its own."""
        return (self.shape[0] // self.tiles, *self.shape[1:]) if self.is_tiled else self.shape

    @property
    def array_nbytes(self) -> int:
        """Bytes of the array on the host, before any encoding."""
        return math.prod(self.shape) * dtypes.element_bytes(self.dtype)

    @property
    def encoded_nbytes(self) -> int:
        """The ``nbytes`` that this dtype, shape and encoding must have."""
        match self.encoding:
            case "raw":
                return self.array_nbytes
            case "constant":
                return dtypes.element_bytes(self.dtype)
            case "bits":
                return -(-self.elements // 8)
            case "tiled":
                return self.array_nbytes // self.tiles
        return 0

    @classmethod
    def all_fit(cls, entries: Sequence[Self], settings: Settings) -> bool:
        # A call for each leaf takes as long as to read it, and most leaves have few dtypes, names and shapes.
        return (
            max([len(leaf.path) for leaf in entries], default=0) <= settings.max_path_chars
            and {leaf.dtype for leaf in entries} <= dtypes.DTYPES.keys()
            and _are_shapes([leaf.shape for leaf in entries], settings)
            and min([leaf.alias_of for leaf in entries if leaf.alias_of is not None], default=0) >= 0
            and {len(leaf.digest) for leaf in entries} <= {DIGEST_BYTES}
            and _are_short({leaf.memory_kind for leaf in entries} | {leaf.key_impl for leaf in entries})
            and MeshSharding.all_fit([leaf.sharding for leaf in entries if leaf.sharding], settings)
        )

    @classmethod
    def read(cls, entry: Fields, settings: Settings) -> Self:
        return cls(
            index=entry.integer("index", 0, settings.max_leaves),
            channel=cast("Channel", entry.choice("channel", _CHANNELS)),
            path=entry.text("path", settings.max_path_chars),
            kind=cast("Kind", entry.choice("kind", _KINDS)),
            dtype=entry.choice("dtype", dtypes.DTYPES.keys()),
            shape=entry.shape("shape", settings.max_rank),
            encoding=cast("Encoding", entry.choice("encoding", _ENCODINGS)),
            alias_of=entry.optional_integer("alias_of", 0, settings.max_leaves),
            same_array=entry.flag("same_array"),
            offset=entry.integer("offset", 0, 1 << 62),
            nbytes=entry.integer("nbytes", 0, 1 << 62),
            digest=entry.binary("digest", 16),
            shards=entry.empty_list("shards"),
            weak_type=entry.flag("weak_type"),
            committed=entry.flag("committed"),
            memory_kind=entry.optional_text("memory_kind", 64),
            sharding=entry.optional("sharding", lambda inner: MeshSharding.read(inner, settings)),
            key_impl=entry.optional_text("key_impl", 64),
        )


def _are_short(names: Iterable[str | None]) -> bool:
    return all(name is None or len(name) <= 64 for name in names)


def _are_shapes(shapes: Iterable[tuple[int, ...]], settings: Settings) -> bool:
    # No set of shapes, and no cache by them: who knows how Python hashes numbers can send very many with one hash.
    return all(is_shape(shape, settings.max_rank) for shape, _ in itertools.groupby(shapes))
