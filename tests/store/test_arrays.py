"""Stored arrays: chunks are whole rows, and metadata that tell of anything else are refused."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
from hypothesis import given, strategies as st

from residual_store.engine.arrays import StoredArray

FLOAT = np.dtype(np.float32)


@given(st.lists(st.integers(1, 7), max_size=4).map(tuple), st.sampled_from([1, 4, 8, 40, 100, 4000]))
def test_chunks_are_the_array_in_order(shape: tuple[int, ...], chunk_bytes: int) -> None:
    """The blocks of the chunks are contiguous, fit into a chunk, and one after the other are the array."""
    values = np.arange(math.prod(shape), dtype=np.float32).reshape(shape)
    array = StoredArray.of(shape, FLOAT, path="leaves/0/", chunk_bytes=chunk_bytes)
    joined = []
    for chunk in array.chunks():
        rows = values[(*chunk.block, ...)]
        assert rows.flags.c_contiguous
        assert rows.nbytes <= chunk.nbytes - 4 <= max(chunk_bytes, 4)
        joined += rows.reshape(-1).tolist()
    assert joined == values.reshape(-1).tolist()
    assert len({chunk.key for chunk in array.chunks()}) == len(list(array.chunks()))


def _metadata(**changes: object) -> bytes:
    array = StoredArray.of((10, 3), FLOAT, path="leaves/0/", chunk_bytes=48)
    return json.dumps(array.metadata | changes).encode()


def test_what_was_written_is_found() -> None:
    """The metadata that make tensorstore store an array tell the same of it afterwards."""
    array = StoredArray.of((10, 3), FLOAT, path="leaves/0/", chunk_bytes=48)
    assert StoredArray.found((10, 3), FLOAT, path="leaves/0/", metadata=_metadata()) == array


@pytest.mark.parametrize(
    "metadata",
    [
        None,
        b"",
        b"[]",
        b"{}",
        b"\xff",
        _metadata(shape=[3, 10]),
        _metadata(shape=[10, 3, 1]),
        _metadata(data_type="int32"),
        _metadata(codecs=[{"name": "bytes", "configuration": {"endian": "big"}}, {"name": "crc32c"}]),
        _metadata(codecs=[{"name": "bytes"}]),
        _metadata(codecs=[{"name": "crc32c"}, {"name": "bytes"}]),
        _metadata(codecs=[{"name": "bytes"}, {"name": "gzip"}, {"name": "crc32c"}]),
        _metadata(chunk_grid={"name": "regular", "configuration": {"chunk_shape": [4]}}),
        _metadata(chunk_grid={"name": "regular", "configuration": {"chunk_shape": [0, 3]}}),
        _metadata(chunk_grid={"name": "regular", "configuration": {"chunk_shape": [-4, 3]}}),
        _metadata(chunk_grid={"name": "regular", "configuration": {"chunk_shape": "43"}}),
        _metadata(chunk_grid={"name": "regular", "configuration": {}}),
    ],
)
def test_other_metadata_are_refused(metadata: bytes | None) -> None:
    """Whatever else stands there is an error, and no guess."""
    with pytest.raises(ValueError, match="leaves/0/"):
        StoredArray.found((10, 3), FLOAT, path="leaves/0/", metadata=metadata)
