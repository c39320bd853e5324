"""Leaves on disk: large ones are arrays of their own, and small ones lie one after the other in the packed array."""

from __future__ import annotations

import contextlib
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import Any

import numpy as np
import xxhash

from residual_store.bundle import Payload, digest_of
from residual_store.dtypes import DTYPES, tensorstore_name
from residual_store.engine.chunks import Chunk, ChunkReader
from residual_store.engine.faults import check_is_damage, is_damage
from residual_store.engine.record import Record
from residual_store.errors import DataLoss
from residual_store.leaf import Leaf

__all__ = ["PACKED", "LeafReader", "as_stored", "path_of"]

PACKED = "packed/"


def path_of(leaf: Leaf) -> str:
    """Where the array of a large leaf stands in the database."""
    return f"leaves/{leaf.index}/"


def as_stored(leaf: Leaf, payload: Payload) -> Any:
    """The payload as the array that tensorstore holds: the leaf's own dtype and shape if it is raw, else bytes."""
    if leaf.encoding != "raw":
        return payload
    return payload.view(DTYPES[tensorstore_name(leaf.dtype)]).reshape(leaf.shape)


@dataclass(frozen=True, kw_only=True)
class _Piece:
    """A chunk on its way into memory, and the leaf that is named if it fails.

    ``memory`` is what it fills of a large leaf, None if it holds small ones.
    """

    leaf: Leaf
    chunk: Chunk
    read: Callable[[], None]
    memory: Payload | None = None


class LeafReader:
    """Reads leaves of one bundle out of its database; ``what`` names it in errors."""

    def __init__(self, chunks: ChunkReader, record: Record, *, what: str) -> None:
        self._chunks = chunks
        self._record = record
        self._what = what

    def read(self, places: Mapping[int, Payload]) -> dict[int, bytes]:
        """Read the leaves with these indices into their places, and return the digests of what was read.

        Raises `DataLoss`, which names the leaf, for what is missing or cannot be read.
        A large leaf is hashed while the rest of it is still being read.
        """
        pieces = [*self._large(places), *self._packed(places)]
        hashes: dict[int, Any] = defaultdict(xxhash.xxh3_128)
        with self._chunks.reading([(piece.chunk, piece.read) for piece in pieces]) as readings:
            for piece, reading in zip(pieces, readings, strict=True):
                with self._names(piece.leaf):
                    reading.result()
                if piece.memory is not None:
                    hashes[piece.leaf.index].update(piece.memory)
        return {
            index: hashes[index].digest() if index in hashes else digest_of(place)
            for index, place in places.items()
        }

    def _large(self, places: Mapping[int, Payload]) -> Iterator[_Piece]:
        leaves = [leaf for leaf in self._record.large if leaf.index in places]
        for leaf, opening in zip(leaves, self._chunks.open_arrays(map(path_of, leaves)), strict=True):
            values = as_stored(leaf, places[leaf.index])
            with self._names(leaf):
                array = _checked(opening.result(), values.shape, values.dtype)
                for chunk in self._chunks.of(array, path_of(leaf)):
                    part = values[(*chunk.block, ...)]
                    if not part.flags.c_contiguous:
                        raise ValueError(f"the chunks of {path_of(leaf)} do not hold whole rows")
                    memory = part.reshape(-1).view(np.uint8)
                    yield _Piece(leaf=leaf, chunk=chunk, read=partial(chunk.read_into, part), memory=memory)

    def _packed(self, places: Mapping[int, Payload]) -> Iterator[_Piece]:
        """Chunks of the packed array; each goes through a buffer of its own, as its leaves do not adjoin in memory."""
        packed = self._record.packed
        ends = list(accumulate(leaf.nbytes for leaf in packed))
        wanted = [leaf for leaf in packed if leaf.index in places]
        if not wanted:
            return
        with self._names(wanted[0]):
            (opening,) = self._chunks.open_arrays([PACKED])
            array = _checked(opening.result(), (ends[-1],), np.dtype(np.uint8))
            for chunk in self._chunks.of(array, PACKED):
                (run,) = chunk.block
                within = range(bisect_right(ends, run.start), bisect_left(ends, run.stop) + 1)
                parts = [
                    (places[packed[number].index], ends[number] - packed[number].nbytes - run.start)
                    for number in within
                    if packed[number].index in places
                ]
                if parts:
                    leaf = next(packed[number] for number in within if packed[number].index in places)
                    yield _Piece(leaf=leaf, chunk=chunk, read=partial(self._unpack, chunk, parts))

    def _unpack(self, chunk: Chunk, parts: Sequence[tuple[Payload, int]]) -> None:
        """Read a chunk and copy to each place what the chunk has of it; a place starts at an offset from the chunk.

        Bytes that tensorstore refuses are taken as they are: the digests tell which leaves are damaged.
        """
        buffer = np.empty(chunk.shape, np.uint8)
        try:
            chunk.read_into(buffer)
        except ValueError as error:
            if not is_damage(error):
                raise
            buffer = self._chunks.read_damaged(chunk)
        for place, start in parts:
            first, last = max(-start, 0), min(len(buffer) - start, len(place))
            place[first:last] = buffer[start + first : start + last]

    @contextlib.contextmanager
    def _names(self, leaf: Leaf) -> Iterator[None]:
        try:
            yield
        except (ValueError, OSError) as error:
            check_is_damage(error, self._what)
            raise DataLoss(
                f"{self._what}: leaf {leaf.index} ({leaf.path}) is missing or damaged on disk",
                leaf=leaf.path,
                index=leaf.index,
            ) from error


def _checked(array: Any, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Any:
    if tuple(array.shape) != shape or array.dtype.numpy_dtype != dtype:
        raise ValueError(f"the stored array is {array.dtype.name}{list(array.shape)}")
    return array
