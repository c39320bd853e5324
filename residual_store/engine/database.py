"""The database of one bundle: a tensorstore OCDBT database that is there wholly or not at all.

One transaction writes a record (the manifest), one zarr3 array for each large leaf, and one array in which all small
leaves are packed, so a bundle is a few files.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import tensorstore as ts

from residual_store.bundle import Bundle, Payload
from residual_store.closing import ClosedAtExit
from residual_store.engine.arrays import StoredArray
from residual_store.engine.faults import check_is_damage, told_apart
from residual_store.engine.leaves import PACKED, LeafReader, as_stored, path_of
from residual_store.engine.record import Record
from residual_store.engine.values import FileValues, StoreValues, Values
from residual_store.errors import DataLoss
from residual_store.leaf import Leaf
from residual_store.settings import Settings

__all__ = ["Database"]

_RECORD = "record"
_DATA_FILES = 4
_DATA_FILE_BYTES = 32 << 20
_INLINE_BYTES = 512


class Database(ClosedAtExit):
    """The OCDBT database below one key-value store ``spec``; ``what`` names the bundle in errors.

    ``directory`` is where it lies, if that is on a file system.
    What was read of it once is not read again, so it is opened for one call.
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
        self._spec: dict[str, Any] = {"driver": "ocdbt", "base": spec}
        self._context = context
        self._settings = settings
        self._what = what
        self._directory = directory

    def close(self) -> None:
        if "_values" in self.__dict__:
            self._values.close()

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
        # The payload outlives the transaction, so tensorstore may read it in place; its store in memory keeps what it is given.
        in_place = self._spec["base"]["driver"] != "memory"
        opening = [self._new_array(spec, transaction, path, values) for path, values in arrays.items()]
        for values, array in zip(arrays.values(), opening, strict=True):
            array.result().write(values, can_reference_source_data_indefinitely=in_place).copy.result()
        database = ts.KvStore.open(spec, context=self._context).result()
        database.with_transaction(transaction).write(_RECORD, record.pack()).result()

    def _new_spec(self, nbytes: int) -> dict[str, Any]:
        """The spec of a database that nobody else writes to, for ``nbytes`` of leaves.

        Large ones go to several files, so that the first are on their way to the disk while the rest is prepared.
        The metadata of arrays are a part of the tree, so that a cold read does not jump to each of them.
        """
        return {
            **self._spec,
            "config": {"max_inline_value_bytes": _INLINE_BYTES},
            "assume_config": True,
            "target_data_file_size": max(nbytes // _DATA_FILES, _DATA_FILE_BYTES),
        }

    def _new_array(self, spec: dict[str, Any], transaction: ts.Transaction, path: str, values: Any) -> Any:
        array = StoredArray.of(values.shape, values.dtype, path=path, chunk_bytes=self._settings.chunk_bytes)
        return ts.open(
            {
                "driver": "zarr3",
                "kvstore": {**spec, "path": path},
                "metadata": array.metadata,
                "store_data_equal_to_fill_value": True,
            },
            create=True,
            transaction=transaction,
            context=self._context,
        )

    def lengthen(self, ttl: float | None) -> None:
        """Give the record a lease of ``ttl`` seconds, or one without end, if that is longer; raises `DataLoss`.

        Nothing is written if the record is gone.
        """
        record = self.read_record()
        if record is None or not record.is_shorter(ttl):
            return
        longer = replace(record, ttl=ttl).pack()
        with told_apart(self._what):
            database = ts.KvStore.open(self._spec, context=self._context).result()
            # Again if another process has changed it meanwhile; nothing else of it ever changes.
            while (found := database.read(_RECORD).result()).state == "value":
                if not Record.unpack(found.value, self._settings).is_shorter(ttl):
                    return
                try:
                    database.write(_RECORD, longer, if_equal=found.stamp.generation).result()
                except ValueError:
                    # Unless it was removed, which is no failure.
                    if database.read(_RECORD).result().state == "value":
                        raise

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
            found = self._values.get(_RECORD)
            return read(found) if found is not None else None
        except (ValueError, KeyError, TypeError, OSError) as error:
            check_is_damage(error, self._what)
            raise DataLoss(f"{self._what}: its manifest cannot be read, so none of its leaves can") from error

    @cached_property
    def _values(self) -> Values:
        if self._directory is not None:
            return FileValues(self._directory, context=self._context)
        return StoreValues(self._spec, context=self._context)

    def read(self, record: Record, segment: Payload) -> Bundle:
        """All leaves, read into ``segment`` and verified; raises `DataLoss` and names the leaf."""
        leaves = record.manifest.leaves
        places = {leaf.index: segment[leaf.offset : leaf.offset + leaf.nbytes] for leaf in leaves}
        digests = LeafReader(self._values, record, what=self._what).read(places)
        for leaf in leaves:
            source = record.manifest.source(leaf.index)
            if not source.is_shared:
                self._check(leaf, digests[source.index])
        return Bundle.of_segment(record.manifest, segment)

    def check(self, record: Record) -> None:
        """Read all leaves, some at a time, and verify them; raises `DataLoss` and names the leaf."""
        reader = LeafReader(self._values, record, what=self._what)
        for leaves in _runs((*record.packed, *record.large), self._settings.chunk_bytes):
            digests = reader.read({leaf.index: np.empty(leaf.nbytes, np.uint8) for leaf in leaves})
            for leaf in leaves:
                self._check(leaf, digests[leaf.index])

    def read_leaf(self, record: Record, leaf: Leaf, segment: Payload) -> Payload:
        """The bytes of one leaf that is not an alias, read into ``segment`` and verified; raises `DataLoss`."""
        places = {leaf.index: segment}
        self._check(leaf, LeafReader(self._values, record, what=self._what).read(places)[leaf.index])
        segment.flags.writeable = False
        return segment

    def _check(self, leaf: Leaf, digest: bytes) -> None:
        if digest != leaf.digest:
            raise DataLoss(
                f"{self._what}: leaf {leaf.index} ({leaf.path}) is damaged: its bytes do not match its digest",
                leaf=leaf.path,
                index=leaf.index,
            )


def _runs(leaves: Iterable[Leaf], nbytes: int) -> Iterator[list[Leaf]]:
    """The leaves in order, in runs that end when they have so many bytes."""
    run, length = list[Leaf](), 0
    for leaf in leaves:
        run.append(leaf)
        length += leaf.nbytes
        if length >= nbytes:
            yield run
            run, length = [], 0
    yield run
