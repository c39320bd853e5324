"""Chunks: the pieces of the stored arrays of a database, read into memory a few at a time."""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import tensorstore as ts

from residual_store.bundle import Payload
from residual_store.engine.extents import Extent, extents_of

__all__ = ["Chunk", "ChunkReader"]

_CHECKSUM_BYTES = 4
_IN_FLIGHT = 4


@dataclass(frozen=True, kw_only=True)
class Chunk:
    """One chunk of a stored array: the ``block`` of it that it holds, and its ``extent`` if it is read from a file."""

    array: Any
    block: tuple[slice, ...]
    key: str
    extent: Extent | None

    @property
    def shape(self) -> tuple[int, ...]:
        """How many elements it has in each dimension."""
        return tuple(side.stop - side.start for side in self.block)

    def read_into(self, memory: Any) -> None:
        """Fill ``memory``, a contiguous array of the chunk's shape and dtype; raises ValueError or OSError.

        A chunk in a file is read without tensorstore's copies, and its checksum is left to the digest of its leaf.
        """
        if self.extent is None:
            ts.array(memory).write(self.array[self.block]).result()
            return
        whole = math.prod(self.array.chunk_layout.read_chunk.shape) * memory.itemsize
        if self.extent.nbytes != whole + _CHECKSUM_BYTES:
            raise ValueError(f"{self.key} has {self.extent.nbytes} bytes, not {whole + _CHECKSUM_BYTES}")
        self.extent.read_into(memory.reshape(-1).view(np.uint8))


class ChunkReader:
    """Reads chunks of the OCDBT database ``spec``; ``directory`` is where it lies, if that is on a file system."""

    def __init__(self, spec: dict[str, Any], *, context: ts.Context, directory: Path | None) -> None:
        self._spec = spec
        self._context = context
        self._directory = directory

    def open_arrays(self, paths: Iterable[str]) -> list[Any]:
        """The arrays at these paths as futures, opened all at once."""
        return [
            ts.open(
                {
                    "driver": "zarr3",
                    "kvstore": {**self._spec, "path": path},
                    "fill_missing_data_reads": False,
                },
                open=True,
                read=True,
                context=self._context,
            )
            for path in paths
        ]

    def of(self, array: Any, path: str) -> Iterator[Chunk]:
        """The chunks of the array at ``path`` in their order; those along an edge hold less than the others."""
        steps = array.chunk_layout.read_chunk.shape
        grid = (range(-(-size // step)) for size, step in zip(array.shape, steps, strict=True))
        for place in itertools.product(*grid):
            block = tuple(
                slice(index * step, min((index + 1) * step, size))
                for index, step, size in zip(place, steps, array.shape, strict=True)
            )
            key = "/".join([f"{path}c", *map(str, place)])
            yield Chunk(array=array, block=block, key=key, extent=self._extents.get(key))

    @cached_property
    def _extents(self) -> dict[str, Extent]:
        # Where the tree is damaged, tensorstore is asked for each chunk and says which ones are lost.
        with contextlib.suppress(ValueError):
            if self._directory is not None:
                return extents_of(self._directory, context=self._context)
        return {}

    def read_damaged(self, chunk: Chunk) -> Payload:
        """The bytes of a chunk that are there, whatever their checksum says; raises ValueError if there are none."""
        found = ts.KvStore.open(self._spec, context=self._context).result().read(chunk.key).result()
        if found.state != "value":
            raise ValueError(f"{chunk.key} is missing")
        return np.frombuffer(found.value, np.uint8)[:-_CHECKSUM_BYTES]

    @contextlib.contextmanager
    def reading(self, reads: Sequence[tuple[Chunk, Callable[[], None]]]) -> Iterator[list[Future[None]]]:
        """Call what reads each chunk, a few at a time and as they lie on the disk; gives a future for each.

        At the end nothing is being read any more, so nobody writes into memory that is given back.
        """
        order = sorted(range(len(reads)), key=lambda number: _on_disk(reads[number][0]))
        with ThreadPoolExecutor(_IN_FLIGHT, thread_name_prefix="residual-store-read") as threads:
            try:
                futures = {number: threads.submit(reads[number][1]) for number in order}
                yield [futures[number] for number in range(len(reads))]
            finally:
                threads.shutdown(cancel_futures=True)


def _on_disk(chunk: Chunk) -> tuple[str, int]:
    return (chunk.extent.path, chunk.extent.offset) if chunk.extent is not None else ("", 0)
