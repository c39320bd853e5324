"""Segments: what is held is what is in use, to the last view."""

from __future__ import annotations

import gc
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from residual_store.segments import NoRoom, SegmentPool


def test_a_segment_is_held_until_its_last_view_dies() -> None:
    """A slice of a reshaped view of another dtype keeps the whole segment."""
    pool = SegmentPool(total=1 << 20)
    segment = pool.allocate(4096)
    view = segment[64:128].view(np.float32).reshape(4, 4)[1:2]
    memory = memoryview(segment)
    del segment
    assert pool.held == 4096
    del memory
    assert pool.held == 4096
    del view
    gc.collect()
    assert pool.held == 0


@pytest.mark.parametrize("nbytes", [1, 63, 64, 65, 4096, 1_000_003])
def test_a_segment_is_aligned(nbytes: int) -> None:
    """It has the length that was asked for and starts at a multiple of 64."""
    segment = SegmentPool(total=1 << 21).allocate(nbytes)
    assert (segment.nbytes, segment.dtype.name, segment.ctypes.data % 64) == (nbytes, "uint8", 0)


def test_the_total_is_a_limit() -> None:
    """What fits to the last byte is given, one more is refused, and a refusal holds nothing."""
    pool = SegmentPool(total=1000)
    held = [pool.allocate(600), pool.allocate(400)]
    with pytest.raises(NoRoom):
        pool.allocate(1)
    held.pop()
    assert pool.held == 600
    with pytest.raises(NoRoom):
        pool.allocate(401)
    assert pool.allocate(400).nbytes == 400


def test_memory_that_the_machine_has_not() -> None:
    """A segment above all memory is refused as no room, and holds nothing."""
    pool = SegmentPool(total=1 << 62)
    with pytest.raises(NoRoom):
        pool.allocate(1 << 60)
    assert pool.held == 0


def test_threads_count_together() -> None:
    """After many segments of many threads nothing is held, and at no time more than the total."""
    pool = SegmentPool(total=64_000)

    def work(number: int) -> int:
        refused = 0
        for size in range(1, 200):
            try:
                segment = pool.allocate(size * (number + 1))
            except NoRoom:
                refused += 1
            else:
                segment[:] = number
                assert pool.held <= 64_000
                assert int(segment.sum()) == number * segment.nbytes
        return refused

    with ThreadPoolExecutor(8) as threads:
        assert len(list(threads.map(work, range(8)))) == 8
    gc.collect()
    assert pool.held == 0
