"""The database of one bundle: a tensorstore OCDBT database that is there wholly or not at all.

One transaction writes a record (the manifest), one zarr3 array for each large leaf, and one array in which all small
leaves are packed, so a bundle is two or three files.
"""

from __future__ import annotations

import contextlib
import itertools
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import msgpack
import numpy as np
import tensorstore as ts

from residual_store.bundle import Bundle, Payload, digest_of
from residual_store.dtypes import DTYPES, tensorstore_name
from residual_store.engine.faults import is_damage, told_apart
from residual_store.errors import DataLoss, InternalError, InvalidManifest
from residual_store.leaf import Leaf
from residual_store.manifest import Manifest, decode, encode
from residual_store.settings import Settings

__all__ = ["Database", "Record"]

_RECORD = "record"
_PACKED = "packed/"
_CHUNKS = "packed/c/"
_CHECKSUM_BYTES = 4
_MARK = b"RSR1"
_CHUNKS_IN_FLIGHT = 2


@dataclass(frozen=True, kw_only=True)
class Record:
    """What stands beside the leaves: the manifest, when the bundle arrived, its lease in seconds, and how it is laid out.

    Leaves with fewer than ``packed_below`` bytes share one array.
    """

    manifest: Manifest
    arrived: float
    ttl: float | None
    packed_below: int

    def is_packed(self, leaf: Leaf) -> bool:
        """Whether a leaf is a part of the packed array."""
        return 0 < leaf.nbytes < self.packed_below

    @property
    def packed(self) -> list[Leaf]:
        """The leaves of the packed array, in its order."""
        return [leaf for leaf in self.manifest.leaves if self.is_packed(leaf)]

    @property
    def large(self) -> list[Leaf]:
        """The leaves that have arrays of their own."""
        return [leaf for leaf in self.manifest.leaves if leaf.nbytes >= self.packed_below]

    def pack(self) -> bytes:
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
        if data[:4] != _MARK or digest_of(data[20:]) != data[4:20]:
            raise InvalidManifest("the record does not match its digest")
        content = msgpack.unpackb(data[20:])
        return cls(
            manifest=decode(content["manifest"], settings),
            arrived=content["arrived"],
            ttl=content["ttl"],
            packed_below=content["packed_below"],
        )


class Database:
    """The OCDBT database below one key-value store ``spec``; ``what`` names the bundle in errors."""

    def __init__(self, spec: dict[str, Any], *, context: ts.Context, settings: Settings, what: str) -> None:
        self._spec = {"driver": "ocdbt", "base": spec}
        self._context = context
        self._settings = settings
        self._what = what

    # Writing

    def write(self, bundle: Bundle, record: Record) -> None:
        """Write everything in one transaction and wait until it is committed and fsynced; raises `StoreFull`."""
        transaction = ts.Transaction(atomic=True)
        try:
            with told_apart(self._what):
                self._stage(transaction, bundle, record)
                transaction.commit_async().result()
        except BaseException:
            transaction.abort()
            raise

    def _stage(self, transaction: ts.Transaction, bundle: Bundle, record: Record) -> None:
        written = [
            self._write_array(
                transaction, f"leaves/{leaf.index}/", _as_stored(leaf, bundle.payloads[leaf.index])
            )
            for leaf in record.large
        ]
        if small := [bundle.payloads[leaf.index] for leaf in record.packed]:
            written.append(self._write_array(transaction, _PACKED, np.concatenate(small)))
        for one in written:
            one.copy.result()
        database = ts.KvStore.open(self._spec, context=self._context).result()
        database.with_transaction(transaction).write(_RECORD, record.pack()).result()

    def _write_array(self, transaction: ts.Transaction, path: str, values: Any) -> Any:
        store = ts.open(
            {
                "driver": "zarr3",
                "kvstore": {**self._spec, "path": path},
                "metadata": {
                    "shape": values.shape,
                    "data_type": "uint8" if values.dtype == np.uint8 else values.dtype.name,
                    "chunk_grid": {
                        "name": "regular",
                        "configuration": {
                            "chunk_shape": self._chunk_shape(values.shape, values.dtype.itemsize)
                        },
                    },
                    "codecs": [{"name": "bytes", "configuration": {"endian": "little"}}, {"name": "crc32c"}],
                },
                "store_data_equal_to_fill_value": True,
            },
            create=True,
            transaction=transaction,
            context=self._context,
        ).result()
        # The payload outlives the transaction, so tensorstore may read it in place.
        return store.write(values, can_reference_source_data_indefinitely=True)

    def _chunk_shape(self, shape: Sequence[int], itemsize: int) -> list[int]:
        """Whole rows, as many as fit into a chunk; the innermost dimensions stay together.

        All chunks are about equally long, because the last one is stored at the full length of a chunk.
        """
        room = max(self._settings.chunk_bytes // itemsize, 1)
        chunk: list[int] = []
        for size in reversed(shape):
            pieces = max(-(-size // room), 1)
            chunk.append(max(-(-size // pieces), 1))
            room = max(room // max(size, 1), 1)
        return chunk[::-1]

    # Reading

    def read_record(self) -> Record | None:
        """The record, or None if nothing has been committed; raises `DataLoss` if it is damaged."""
        try:
            database = ts.KvStore.open(self._spec, context=self._context).result()
            found = database.read(_RECORD).result()
            return Record.unpack(found.value, self._settings) if found.state == "value" else None
        except (ValueError, KeyError, TypeError) as error:
            self._unless_unreachable(error)
            raise DataLoss(f"{self._what}: its manifest cannot be read, so none of its leaves can") from error

    def read(self, record: Record, segment: Payload) -> Bundle:
        """All leaves, read into ``segment`` and verified; raises `DataLoss` and names the leaf."""
        places = {
            leaf.index: segment[leaf.offset : leaf.offset + leaf.nbytes] for leaf in record.manifest.leaves
        }
        self._read_arrays(
            [(leaf, f"leaves/{leaf.index}/", _as_stored(leaf, places[leaf.index])) for leaf in record.large]
        )
        if record.packed:
            packed, start = self._read_packed(record, slice(0, sum(leaf.nbytes for leaf in record.packed))), 0
            for leaf in record.packed:
                places[leaf.index][:] = packed[start : start + leaf.nbytes]
                start += leaf.nbytes
        bundle = Bundle.of_segment(record.manifest, segment)
        try:
            bundle.verify(DataLoss)
        except DataLoss as error:
            raise DataLoss(f"{self._what}: {error.detail}", **error.fields) from None
        return bundle

    def read_leaf(self, record: Record, leaf: Leaf, segment: Payload) -> Payload:
        """The bytes of one leaf that is not an alias, read into ``segment`` and verified; raises `DataLoss`."""
        if not record.is_packed(leaf) and leaf.nbytes:
            self._read_arrays([(leaf, f"leaves/{leaf.index}/", _as_stored(leaf, segment))])
        elif leaf.nbytes:
            start = sum(other.nbytes for other in record.packed if other.index < leaf.index)
            segment[:] = self._read_packed(record, slice(start, start + leaf.nbytes))
        if digest_of(segment) != leaf.digest:
            raise DataLoss(
                f"{self._what}: leaf {leaf.index} ({leaf.path}) is damaged", leaf=leaf.path, index=leaf.index
            )
        segment.flags.writeable = False
        return segment

    def _read_packed(self, record: Record, part: slice) -> Payload:
        """A part of the packed bytes.

        Where tensorstore refuses a damaged chunk they are taken as they are: the digests tell which leaves are damaged.
        """
        packed = np.empty(part.stop - part.start, np.uint8)
        try:
            self._read_arrays([(record.packed[0], _PACKED, packed)], part=part)
        except DataLoss:
            packed = self._salvage_packed(record)[part]
        return packed

    def _salvage_packed(self, record: Record) -> Payload:
        packed = np.zeros(sum(leaf.nbytes for leaf in record.packed), np.uint8)
        with contextlib.suppress(ValueError):
            database = ts.KvStore.open(self._spec, context=self._context).result()
            for key in database.list(ts.KvStore.KeyRange(_CHUNKS, _CHUNKS[:-1] + "0")).result():
                chunk = np.frombuffer(database.read(key).result().value, np.uint8)[:-_CHECKSUM_BYTES]
                start = int(key.rpartition(b"/")[2]) * len(chunk)
                packed[start : start + len(chunk)] = chunk[: max(len(packed) - start, 0)]
        return packed

    def _read_arrays(self, arrays: list[tuple[Leaf, str, Any]], *, part: slice | None = None) -> None:
        """Read all arrays, or a ``part`` of each, straight into the memory of their values.

        A few chunks are in flight at a time: tensorstore holds each of them twice while it decodes it.
        """
        opening = [(leaf, self._open_array(path), values) for leaf, path, values in arrays]
        flying: deque[tuple[Leaf, Any]] = deque()
        for leaf, opened, values in opening:
            with self._names(leaf):
                source = _checked(opened.result(), values, part)
            for block in _blocks(values.shape, source.chunk_layout.read_chunk.shape):
                flying.append((leaf, ts.array(values[block]).write(source[block])))
                if len(flying) > _CHUNKS_IN_FLIGHT:
                    self._finish(*flying.popleft())
        while flying:
            self._finish(*flying.popleft())

    def _finish(self, leaf: Leaf, reading: Any) -> None:
        with self._names(leaf):
            reading.result()

    def _open_array(self, path: str) -> Any:
        return ts.open(
            {"driver": "zarr3", "kvstore": {**self._spec, "path": path}, "fill_missing_data_reads": False},
            open=True,
            read=True,
            context=self._context,
        )

    def _unless_unreachable(self, error: Exception) -> None:
        if not is_damage(error):
            raise InternalError(f"{self._what}: the storage failed, and may be read later") from error

    @contextlib.contextmanager
    def _names(self, leaf: Leaf) -> Iterator[None]:
        try:
            yield
        except ValueError as error:
            self._unless_unreachable(error)
            raise DataLoss(
                f"{self._what}: leaf {leaf.index} ({leaf.path}) is missing or damaged on disk",
                leaf=leaf.path,
                index=leaf.index,
            ) from error


def _checked(store: Any, values: Any, part: slice | None) -> Any:
    source = store if part is None else store[part][ts.d[0].translate_to[0]]
    if tuple(source.shape) != values.shape or source.dtype.numpy_dtype != values.dtype:
        raise ValueError(f"the stored array is {store.dtype.name}{list(store.shape)}")
    return source


def _blocks(shape: Sequence[int], chunk: Sequence[int]) -> Iterator[tuple[slice, ...]]:
    """The chunks of an array, as slices."""
    sides = [
        [slice(start, min(start + step, size)) for start in range(0, size, max(step, 1))]
        for size, step in zip(shape, chunk, strict=True)
    ]
    return itertools.product(*sides)


def _as_stored(leaf: Leaf, payload: Payload) -> Any:
    """The payload as the array that tensorstore holds: the leaf's own dtype and shape if it is raw, else bytes."""
    if leaf.encoding != "raw":
        return payload
    return payload.view(DTYPES[tensorstore_name(leaf.dtype)]).reshape(leaf.shape)
