"""Stored arrays: how the values of leaves are cut into chunks, as the metadata of a zarr3 array say it."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np

__all__ = ["Chunk", "StoredArray"]

_CHECKSUM_BYTES = 4
_LITTLE = {"endian": "little"}


@dataclass(frozen=True, kw_only=True)
class Chunk:
    """One chunk: its ``key`` in the database, the ``block`` of the array that it holds, and its length with its checksum.

    A chunk at an edge holds less of the array than the others, and is as long.
    """

    key: str
    block: tuple[slice, ...]
    nbytes: int


@dataclass(frozen=True, kw_only=True)
class StoredArray:
    """The array at ``path`` in a database.

    Its chunks hold whole rows, so one after the other they are the bytes of the array.

    >>> array = StoredArray.of((10,), np.dtype(np.uint8), path="packed/", chunk_bytes=8)
    >>> [(chunk.key, chunk.block) for chunk in array.chunks()]
    [('packed/c/0', (slice(0, 5, None),)), ('packed/c/1', (slice(5, 10, None),))]
    """

    path: str
    shape: tuple[int, ...]
    data_type: str
    itemsize: int
    chunk: tuple[int, ...]

    @classmethod
    def of(cls, shape: tuple[int, ...], dtype: np.dtype[Any], *, path: str, chunk_bytes: int) -> Self:
        """How an array is to be stored: in a chunk as many whole rows as fit, the innermost dimensions together.

        All chunks are about equally long, because the last one is stored at the full length of a chunk.
        """
        room = max(chunk_bytes // dtype.itemsize, 1)
        chunk: list[int] = []
        for size in reversed(shape):
            pieces = max(-(-size // room), 1)
            chunk.append(max(-(-size // pieces), 1))
            room = max(room // max(size, 1), 1)
        return cls._with(shape, dtype, path, chunk[::-1])

    @classmethod
    def found(
        cls, shape: tuple[int, ...], dtype: np.dtype[Any], *, path: str, metadata: bytes | None
    ) -> Self:
        """How an array is stored; raises ValueError if the metadata there are not those of such an array."""
        try:
            given = json.loads(metadata or b"")
            chunk = tuple(int(step) for step in given["chunk_grid"]["configuration"]["chunk_shape"])
            codecs = {one["name"]: one.get("configuration", _LITTLE) for one in given["codecs"]}
            stored = (given["shape"], given["data_type"], list(codecs), codecs["bytes"], given["chunk_grid"])
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{path} has no metadata of an array") from error
        array = cls._with(shape, dtype, path, chunk)
        grid = {"name": "regular", "configuration": {"chunk_shape": list(chunk)}}
        expected = (list(shape), array.data_type, ["bytes", "crc32c"], _LITTLE, grid)
        if stored != expected or len(chunk) != len(shape) or min(chunk, default=1) < 1:
            raise ValueError(f"{path} is not stored as the manifest tells")
        return array

    @classmethod
    def _with(cls, shape: tuple[int, ...], dtype: np.dtype[Any], path: str, chunk: Sequence[int]) -> Self:
        name = "uint8" if dtype == np.uint8 else dtype.name
        return cls(path=path, shape=shape, data_type=name, itemsize=dtype.itemsize, chunk=tuple(chunk))

    @property
    def metadata(self) -> dict[str, Any]:
        """What makes tensorstore store the array so."""
        return {
            "shape": self.shape,
            "data_type": self.data_type,
            "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": self.chunk}},
            "codecs": [{"name": "bytes", "configuration": _LITTLE}, {"name": "crc32c"}],
        }

    def chunks(self) -> Iterator[Chunk]:
        """The chunks in the order of their bytes."""
        nbytes = math.prod(self.chunk) * self.itemsize + _CHECKSUM_BYTES
        sides = [
            [slice(start, min(start + step, size)) for start in range(0, size, step)]
            for size, step in zip(self.shape, self.chunk, strict=True)
        ]
        for block in itertools.product(*sides):
            place = (str(side.start // step) for side, step in zip(block, self.chunk, strict=True))
            yield Chunk(key="/".join([f"{self.path}c", *place]), block=block, nbytes=nbytes)
