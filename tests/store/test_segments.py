"""Segments: what is held is what is in use, to the last view, and what comes back is used again."""

from __future__ import annotations

import gc
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from residual_store.arena import Arena, NoRoom, PrivateArena
from residual_store.segments import SegmentPool, size_class

MIB = 1 << 20


class Clock:
    """A clock that moves when it is told to."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_a_segment_is_held_until_its_last_view_dies() -> None:
    """A slice of a reshaped view of another dtype keeps the whole segment, pooled or not."""
    for nbytes in (4096, MIB):
        pool = SegmentPool(total=MIB)
        memory = pool.allocate(nbytes).memory
        view = memory[64:128].view(np.float32).reshape(4, 4)[1:2]
        raw = memoryview(memory)
        del memory
        assert pool.usage.held == nbytes
        del raw
        assert pool.usage.held == nbytes
        del view
        gc.collect()
        assert pool.usage.held == 0


@pytest.mark.parametrize("nbytes", [1, 63, 64, 65, 4096, 1_000_003])
def test_a_segment_is_aligned(nbytes: int) -> None:
    """It has the length that was asked for and starts at a multiple of 64, or of a page if it is pooled."""
    memory = SegmentPool(total=1 << 21).allocate(nbytes).memory
    aligned = 4096 if nbytes >= 64 << 10 else 64
    assert (memory.nbytes, memory.dtype.name, memory.ctypes.data % aligned) == (nbytes, "uint8", 0)


def test_the_total_is_a_limit() -> None:
    """What fits to the last byte is given, one more is refused, and a refusal holds nothing."""
    pool = SegmentPool(total=1000)
    held = [pool.allocate(600), pool.allocate(400)]
    with pytest.raises(NoRoom):
        pool.allocate(1)
    held.pop()
    assert pool.usage.held == 600
    with pytest.raises(NoRoom):
        pool.allocate(401)
    assert pool.allocate(400).memory.nbytes == 400


def test_memory_that_the_machine_has_not() -> None:
    """A segment above all memory is refused as no room, and holds nothing."""
    pool = SegmentPool(total=1 << 62)
    with pytest.raises(NoRoom):
        pool.allocate(1 << 60)
    assert pool.usage.held == 0


def test_threads_count_together() -> None:
    """After many segments of many threads nothing is held, at no time more than the total, and no two are one."""
    pool = SegmentPool(total=64_000, smallest=4096)

    def work(number: int) -> int:
        refused = 0
        for size in range(1, 200):
            try:
                memory = pool.allocate(size * (number + 1) * 8).memory
            except NoRoom:
                refused += 1
            else:
                memory[:] = number
                assert pool.usage.held <= 64_000
                assert int(memory.sum()) == number * memory.nbytes
        return refused

    with ThreadPoolExecutor(8) as threads:
        assert len(list(threads.map(work, range(8)))) == 8
    gc.collect()
    assert pool.usage.held == 0


def test_memory_is_used_again() -> None:
    """What came back is given out again for the same class of size, and `usage` counts it."""
    pool = SegmentPool(total=8 * MIB)
    first = pool.allocate(MIB).memory
    address = first.ctypes.data
    del first
    assert (pool.usage.held, pool.usage.idle) == (0, MIB)
    again = pool.allocate(MIB - 1000).memory
    assert again.ctypes.data == address
    assert (pool.usage.fresh, pool.usage.recycled, pool.usage.idle) == (1, 1, 0)


def test_memory_of_another_run_is_zeroed() -> None:
    """Who may read one run does not read what is left of another; within a run nothing is zeroed."""
    pool = SegmentPool(total=8 * MIB)
    pool.allocate(MIB, run="secret").memory[:] = 7
    assert pool.allocate(MIB, run="secret").memory.min() == 7
    assert pool.allocate(MIB, run="other").memory.max() == 0


def test_a_run_s_own_memory_is_recycled_at_once() -> None:
    """Not before there is any, not another run's, not what is in use, and not for what is too long or too short for it."""
    pool = SegmentPool(total=64 * MIB)
    assert pool.recycle(MIB, run="a") is None
    segment = pool.allocate(MIB, run="a")
    assert pool.recycle(MIB, run="a") is None
    segment.memory[:] = 7
    del segment
    for nbytes, run in ((MIB, "b"), (MIB + 1, "a"), (MIB // 2, "a"), (0, "a")):
        assert pool.recycle(nbytes, run=run) is None
    again = pool.recycle(MIB - 5, run="a")
    assert again is not None
    assert again.memory.nbytes == MIB - 5
    assert (again.memory == 7).all()
    assert (pool.usage.held, pool.usage.idle, pool.usage.recycled) == (MIB, 0, 1)


def test_a_larger_block_of_its_own_is_recycled_before_another_run_s() -> None:
    """At once there is nothing that would have to be zeroed first."""
    pool = SegmentPool(total=64 * MIB)
    larger, other = pool.allocate(MIB + MIB // 16, run="a"), pool.allocate(MIB, run="b")
    larger.memory[:] = 7
    del larger, other
    recycled = pool.recycle(MIB, run="a")
    assert recycled is not None
    assert (recycled.memory == 7).all()


class _Slow(PrivateArena):
    """An arena whose memory takes as long to populate as the test wants."""

    def __init__(self, nbytes: int) -> None:
        super().__init__(nbytes)
        self.begun, self.go_on = threading.Event(), threading.Event()

    def populate(self, start: int, nbytes: int) -> None:
        if nbytes > 8 * MIB:
            self.begun.set()
            assert self.go_on.wait(60)
        super().populate(start, nbytes)


def test_nobody_waits_for_another_one_s_new_memory() -> None:
    """It is populated without the lock of the pool, and counted already."""
    arena = _Slow(64 * MIB)
    pool = SegmentPool(total=64 * MIB, arena=arena)
    with ThreadPoolExecutor(1) as thread:
        slow = thread.submit(pool.allocate, 9 * MIB)
        assert arena.begun.wait(60)
        assert pool.allocate(MIB).memory.nbytes == MIB
        assert pool.usage.held == 9 * MIB
        arena.go_on.set()
        assert slow.result().memory.nbytes == 9 * MIB


class _Full(PrivateArena):
    """An arena that is interrupted, or has no memory, when it is to be populated."""

    error: BaseException = NoRoom("no memory")

    def populate(self, start: int, nbytes: int) -> None:
        raise self.error


def test_what_cannot_be_populated_is_given_back() -> None:
    """Whether there is no memory, and the heap gives some, or the caller was interrupted: the addresses can be used again."""
    arena = _Full(4 * MIB)
    pool = SegmentPool(total=8 * MIB, arena=arena)
    for _ in range(4):
        assert pool.allocate(3 * MIB).place is None
    arena.error = KeyboardInterrupt()
    for _ in range(4):
        with pytest.raises(KeyboardInterrupt):
            pool.allocate(3 * MIB)
    gc.collect()
    assert (pool.usage.held, pool.usage.fresh) == (0, 0)


def test_idle_memory_gives_way() -> None:
    """A segment of another size takes the room of idle ones, and then of nothing that is held."""
    pool = SegmentPool(total=8 * MIB)
    for size in (2, 3, 1):
        pool.allocate(size * MIB)
    assert pool.usage.idle == 6 * MIB
    large = pool.allocate(7 * MIB)
    assert (pool.usage.held, pool.usage.idle) == (7 * MIB, MIB)
    with pytest.raises(NoRoom):
        pool.allocate(2 * MIB)
    del large


def test_idle_memory_goes_back_to_the_machine() -> None:
    """After ``idle_seconds``, and not before; what is used meanwhile stays."""
    clock = Clock()
    pool = SegmentPool(total=8 * MIB, idle_seconds=100.0, clock=clock)
    pool.allocate(MIB)
    assert pool.usage.idle == MIB
    clock.now = 99.0
    pool.trim()
    assert pool.usage.idle == MIB
    clock.now = 100.0
    pool.trim()
    assert pool.usage.idle == 0
    assert pool.allocate(MIB).memory.max() == 0, "the memory is new"


def test_idle_memory_is_no_more_than_was_in_use() -> None:
    """Sizes that never come back do not add up: what is held and idle is half as much again as was held lately."""
    pool = SegmentPool(total=4096 * MIB, idle_seconds=1000.0, clock=Clock())
    most = 0
    for size in range(40, 60):
        pool.allocate(size * MIB)
        most = max(most, pool.usage.idle)
    assert 0 < most <= 60 * MIB * 3 // 2
    fresh = pool.usage.fresh
    for _ in range(20):
        pool.allocate(59 * MIB)
    assert pool.usage.fresh == fresh, "what comes again is used again"


def test_a_size_class_wastes_little() -> None:
    """At most a 32nd, or a page; powers of two are exact; larger needs never get smaller blocks."""
    sizes = [1, 4096, 4097, 100_000, MIB, MIB + 1, 128 * MIB, 128 * MIB + 1, (1 << 30) + 4096]
    blocks = [size_class(size) for size in sizes]
    assert blocks == sorted(blocks)
    for size, block in zip(sizes, blocks, strict=True):
        assert size <= block <= max(size + size // 32 + 4096, 4096)
        assert block % 4096 == 0
    assert size_class(128 * MIB) == 128 * MIB


class _Lingering(PrivateArena):
    """An arena whose blocks another process goes on using."""

    used = True

    def reclaim(self, start: int, nbytes: int, run: str) -> bool:
        return not self.used


def test_what_another_process_uses_is_not_used_again() -> None:
    """A block without a view here counts as held, and is neither handed out nor forgotten, until the other lets go."""
    arena = _Lingering(64 * MIB)
    checked: Arena = arena
    pool = SegmentPool(total=3 * MIB, arena=checked)
    address = pool.allocate(MIB).memory.ctypes.data
    assert pool.usage.held == MIB
    others = [pool.allocate(MIB).memory for _ in range(2)]
    assert address not in [memory.ctypes.data for memory in others]
    with pytest.raises(NoRoom):
        pool.allocate(MIB)
    arena.used = False
    assert pool.allocate(MIB).memory.ctypes.data == address
