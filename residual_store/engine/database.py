"""The database of one bundle: a tensorstore OCDBT database that is there wholly or not at all.

One transaction writes a record (the manifest), one zarr3 array for each large leaf, and one array in which all small
leaves are packed, so a bundle is a few files.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tensorstore as ts

from residual_store.bundle import Bundle, Payload
from residual_store.engine.chunks import ChunkReader
from residual_store.engine.faults import check_is_damage, told_apart
from residual_store.engine.leaves import PACKED, LeafReader, as_stored, path_of
from residual_store.engine.record import Record
from residual_store.errors import DataLoss
from residual_store.leaf import Leaf
from residual_store.settings import Settings

__all__ = ["Database"]

_RECORD = "record"
_DATA_FILES = 8
_DATA_FILE_BYTES = 32 << 20


class Database:
    """The OCDBT database below one key-value store ``spec``; ``what`` names the bundle in errors.

    ``directory`` is where it lies, if that is on a file system.
    """

    def __init__(
        self,
        spec: dict[str, Any],
        *,
        context: ts.Context,
        settings: Settings,
        what: str,
        directory: Path | None = None,
    ) -> None:
        self._spec = {"driver": "ocdbt", "base": spec}
        self._context = context
        self._settings = settings
        self._what = what
        self._directory = directory

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
        arrays = {path_of(leaf): as_stored(leaf, bundle.payloads[leaf.index]) for leaf in record.large}
        if record.packed:
            arrays[PACKED] = np.concatenate([bundle.payloads[leaf.index] for leaf in record.packed])
        spec = self._new_spec(bundle.manifest.nbytes)
        for one in [self._write_array(spec, transaction, path, values) for path, values in arrays.items()]:
            one.copy.result()
        database = ts.KvStore.open(spec, context=self._context).result()
        database.with_transaction(transaction).write(_RECORD, record.pack()).result()

    def _new_spec(self, nbytes: int) -> dict[str, Any]:
        """The spec of a database that nobody else writes to, for ``nbytes`` of leaves.

        Large ones go to several files, so that the first are on their way to the disk while the rest is prepared.
        """
        file_bytes = max(nbytes // _DATA_FILES, _DATA_FILE_BYTES)
        return {**self._spec, "assume_config": True, "target_data_file_size": file_bytes}

    def _write_array(self, spec: dict[str, Any], transaction: ts.Transaction, path: str, values: Any) -> Any:
        store = ts.open(
            {
                "driver": "zarr3",
                "kvstore": {**spec, "path": path},
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
        return self._of_record(lambda data: Record.unpack(data, self._settings))

    def is_begun(self) -> bool:
        """Whether nothing has been committed yet; a damaged database has been committed to."""
        try:
            return self._of_record(len) is None
        except DataLoss:
            return False

    def _of_record[T](self, read: Callable[[bytes], T]) -> T | None:
        try:
            database = ts.KvStore.open(self._spec, context=self._context).result()
            found = database.read(_RECORD).result()
            return read(found.value) if found.state == "value" else None
        except (ValueError, KeyError, TypeError) as error:
            check_is_damage(error, self._what)
            raise DataLoss(f"{self._what}: its manifest cannot be read, so none of its leaves can") from error

    def read(self, record: Record, segment: Payload) -> Bundle:
        """All leaves, read into ``segment`` and verified; raises `DataLoss` and names the leaf."""
        leaves = record.manifest.leaves
        places = {leaf.index: segment[leaf.offset : leaf.offset + leaf.nbytes] for leaf in leaves}
        digests = self._leaves(record).read(places)
        for leaf in leaves:
            self._check(leaf, digests[record.manifest.source(leaf.index).index])
        return Bundle.of_segment(record.manifest, segment)

    def read_leaf(self, record: Record, leaf: Leaf, segment: Payload) -> Payload:
        """The bytes of one leaf that is not an alias, read into ``segment`` and verified; raises `DataLoss`."""
        self._check(leaf, self._leaves(record).read({leaf.index: segment})[leaf.index])
        segment.flags.writeable = False
        return segment

    def _leaves(self, record: Record) -> LeafReader:
        chunks = ChunkReader(self._spec, context=self._context, directory=self._directory)
        return LeafReader(chunks, record, what=self._what)

    def _check(self, leaf: Leaf, digest: bytes) -> None:
        if digest != leaf.digest:
            raise DataLoss(
                f"{self._what}: leaf {leaf.index} ({leaf.path}) is damaged: its bytes do not match its digest",
                leaf=leaf.path,
                index=leaf.index,
            )
