"""Leaves on disk: large ones are arrays of their own, and small ones lie one after the other in the packed array."""

from __future__ import annotations

import itertools
import threading
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import accumulate
from typing import Any

import numpy as np
import xxhash

from residual_store.bundle import Payload, digest_of
from residual_store.dtypes import DTYPES, tensorstore_name
from residual_store.engine.arrays import StoredArray
from residual_store.engine.faults import check_is_damage
from residual_store.engine.record import Record
from residual_store.engine.values import Seen, Values
from residual_store.errors import DataLoss
from residual_store.leaf import Leaf
from residual_store.second_thread import SecondThread, is_worth_two
from residual_store.translation import Translation

__all__ = ["PACKED", "LeafReader", "as_stored", "path_of"]

PACKED = "packed/"
_AHEAD = 2

type _Reading = tuple[Leaf, Callable[[], object]]


def path_of(leaf: Leaf) -> str:
    """Where the array of a large leaf stands in the database."""
    return f"leaves/{leaf.index}/"


def as_stored(leaf: Leaf, payload: Payload) -> Any:
    """The payload as the array that tensorstore holds: the leaf's own dtype and shape if it is raw, else bytes."""
    if leaf.encoding != "raw":
        return payload
    return payload.view(DTYPES[tensorstore_name(leaf.dtype)]).reshape(leaf.shape)


class LeafReader:
    """Reads leaves of one bundle out of the values of its database; ``what`` names it in errors."""

    def __init__(self, values: Values, record: Record, *, what: str) -> None:
        self._values = values
        self._record = record
        self._what = what

    def read(self, places: Mapping[int, Payload]) -> dict[int, bytes]:
        """Read the leaves with these indices into their places, and return the digests of what was read.

        Nothing else is checked: a digest covers every byte of its leaf, the checksums of chunks are for other readers.
        Raises `DataLoss`, which names the leaf, for what is missing.
        """
        large = sorted((leaf for leaf in self._record.large if leaf.index in places), key=path_of)
        hashes = {leaf.index: xxhash.xxh3_128() for leaf in large}
        first, second = _halves(large)
        mine = itertools.chain(self._large(first, places, hashes), self._packed(places))
        self._finish_both(mine, self._large(second, places, hashes) if second else None)
        return {
            index: hashes[index].digest() if index in hashes else digest_of(place)
            for index, place in places.items()
        }

    def _finish_both(self, mine: Iterable[_Reading], others: Iterable[_Reading] | None) -> None:
        """Read in two threads; a leaf is read by one, whose descriptors the kernel sees read in order."""
        if others is None:
            self._finish_all(mine)
            return
        stop = threading.Event()
        going_on = itertools.takewhile(lambda _: not stop.is_set(), others)
        with SecondThread() as second:
            second.beside(partial(self._finish_all, mine), partial(self._finish_all, going_on), stop=stop.set)

    def _finish_all(self, readings: Iterable[_Reading]) -> None:
        begun: deque[_Reading] = deque()
        for reading in readings:
            begun.append(reading)
            if len(begun) > _AHEAD:
                self._finish(*begun.popleft())
        while begun:
            self._finish(*begun.popleft())

    def _finish(self, leaf: Leaf, finish: Callable[[], object]) -> None:
        with self._names(leaf):
            finish()

    def _large(
        self, leaves: Iterable[Leaf], places: Mapping[int, Payload], hashes: Mapping[int, Any]
    ) -> Iterator[_Reading]:
        """Begin to read the chunks of large leaves, leaf by leaf."""
        for leaf in leaves:
            with self._names(leaf):
                values = as_stored(leaf, places[leaf.index])
                for chunk in self._array(values.shape, values.dtype, path_of(leaf)).chunks():
                    rows = values[(*chunk.block, ...)]
                    if not rows.flags.c_contiguous:
                        raise ValueError(f"{chunk.key} does not hold whole rows")
                    memory = rows.reshape(-1).view(np.uint8)
                    finish = self._values.begin(chunk.key, memory, nbytes=chunk.nbytes)
                    yield leaf, partial(finish, hashes[leaf.index].update)

    def _packed(self, places: Mapping[int, Payload]) -> Iterator[_Reading]:
        """Begin to read each chunk of the packed array that has something of the leaves, into a buffer of its own."""
        packed = self._record.packed
        if not any(leaf.index in places for leaf in packed):
            return
        ends = list(accumulate(leaf.nbytes for leaf in packed))
        with self._names(packed[0]):
            for chunk in self._array((ends[-1],), np.dtype(np.uint8), PACKED).chunks():
                (run,) = chunk.block
                within = range(bisect_right(ends, run.start), bisect_left(ends, run.stop) + 1)
                parts = [
                    (leaf, places[leaf.index], ends[number] - leaf.nbytes - run.start)
                    for number in within
                    if (leaf := packed[number]).index in places
                ]
                if parts:
                    buffer = np.empty(run.stop - run.start, np.uint8)
                    finish = self._values.begin(chunk.key, buffer, nbytes=chunk.nbytes)
                    yield parts[0][0], partial(_unpack, finish, buffer, parts)

    def _array(self, shape: tuple[int, ...], dtype: np.dtype[Any], path: str) -> StoredArray:
        return StoredArray.found(shape, dtype, path=path, metadata=self._values.get(f"{path}zarr.json"))

    def _names(self, leaf: Leaf) -> Translation:
        return Translation(partial(self._translate, leaf))

    def _translate(self, leaf: Leaf, error: Exception) -> None:
        if not isinstance(error, ValueError | OSError):
            return
        check_is_damage(error, self._what)
        raise DataLoss(
            f"{self._what}: leaf {leaf.index} ({leaf.path}) is missing or damaged on disk",
            leaf=leaf.path,
            index=leaf.index,
        ) from error


def _halves(leaves: Sequence[Leaf]) -> tuple[Sequence[Leaf], Sequence[Leaf]]:
    """Leaves in the order in which they lie in files, for two threads; all for one where a second is of no use."""
    ends = list(accumulate(leaf.nbytes for leaf in leaves))
    if not ends or not is_worth_two(ends[-1]):
        return leaves, ()
    middle = bisect_left(ends, ends[-1] // 2) + 1
    return leaves[:middle], leaves[middle:]


def _unpack(
    finish: Callable[[Seen], None], buffer: Payload, parts: Sequence[tuple[Leaf, Payload, int]]
) -> None:
    """Copy to the place of each leaf what a chunk has of it; a leaf starts at an offset from the chunk."""
    finish(len)
    for _, place, start in parts:
        first, last = max(-start, 0), min(len(buffer) - start, len(place))
        place[first:last] = buffer[start + first : start + last]
