"""Segments: the host memory that bundles live in, one segment for each bundle, pooled and used again.

Leaves are views into their segment.
A segment comes back to the pool when the last view of it dies, wherever that view is: the garbage collector is the
reference count.
Fresh memory costs six to ten times what a copy into it costs, so the pool keeps what comes back, in classes of size, for
as long as somebody may want it again.
"""

from __future__ import annotations

import itertools
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace

from residual_store.arena import PAGE, AddressSpace, Arena, NoRoom, private_arena
from residual_store.bundle import Payload
from residual_store.frame import aligned_empty
from residual_store.high_water import HighWater
from residual_store.place import BlockName, Place
from residual_store.pool_usage import PoolUsage
from residual_store.segment import Segment
from residual_store.size_class import largest_for, size_class
from residual_store.trimmer import Trimmer

__all__ = ["NoRoom", "SegmentPool"]


@dataclass(frozen=True, kw_only=True, eq=False)
class _Block:
    """A part of the arena: a page for the ticket, and ``nbytes`` for a leaf area."""

    start: int
    nbytes: int
    run: str
    idle_since: float = 0.0


class SegmentPool:
    """Hands out segments within a total of bytes; safe to use from several threads.

    Segments below ``smallest`` bytes come from the heap and are counted only.
    Memory that nobody used for ``idle_seconds`` goes back to the machine.

    >>> pool = SegmentPool(total=1 << 20)
    >>> segment = pool.allocate(100_000)
    >>> pool.usage.held
    102400
    >>> del segment
    >>> pool.usage.held, pool.usage.idle
    (0, 102400)
    """

    def __init__(
        self,
        *,
        total: int,
        arena: Arena | None = None,
        smallest: int = 64 << 10,
        idle_seconds: float = 5.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.total = total
        self._arena = arena if arena is not None else private_arena(total)
        self._smallest = smallest
        self._idle_seconds = idle_seconds
        self._clock = clock
        self._space = AddressSpace.of(self._arena)
        self._idle: dict[int, deque[_Block]] = {}
        # Blocks without a view in this process that another process still uses.
        self._lingering: list[_Block] = []
        self._usage = PoolUsage()
        self._water = HighWater(seconds=idle_seconds, clock=clock)
        self._lock = threading.Lock()
        # Views die at any moment, in any thread, so what they leave is only noted, and taken in at the next call.
        self._returned: deque[_Block | int] = deque()
        self._trimmer = Trimmer(self, idle_seconds=idle_seconds)

    @property
    def usage(self) -> PoolUsage:
        """What the pool holds just now."""
        with self._lock:
            self._take_in(lingering=True)
            return self._usage

    @property
    def is_empty(self) -> bool:
        """Whether there is no block any more, neither held nor idle."""
        usage = self.usage
        return usage.held + usage.idle == 0

    def void(self, place: Place | None) -> None:
        """Let no other process find the segment at a place any more."""
        if place is not None and self._arena is not None:
            self._arena.void(place)

    def renewed(self, place: Place | None) -> Place | None:
        """Another place of the same segment, which no other process finds at the first one any more."""
        if place is None or self._arena is None:
            return None
        return self._arena.place(place.offset - PAGE, place.nbytes)

    def settle(self) -> None:
        """Take in what has come back, so that clients on this host find it."""
        with self._lock:
            self._take_in()

    def close(self) -> None:
        """Let go of the arena; segments stay valid."""
        # Clients may have the whole of a shared arena mapped, and would keep the memory of idle blocks.
        self.trim(idle_seconds=0.0)
        if self._arena is not None:
            self._arena.close()

    def allocate(self, nbytes: int, *, run: str = "") -> Segment:
        """A segment of ``nbytes`` uninitialized bytes; raises `NoRoom`.

        Memory that another ``run`` has used is zeroed first: who may read one run may not read what is left of another.
        """
        size = size_class(nbytes) if nbytes >= max(self._smallest, 1) else 0
        if not 0 < size <= self.total:
            return self._on_heap(nbytes)
        with self._lock:
            self._take_in()
            block, fresh = self._recycled(size, run), None
            if block is None:
                self._take_in(lingering=True)
                block = self._recycled(size, run)
                fresh = self._fresh(size, run) if block is None else None
        if fresh is not None:
            block = self._populated(fresh)
        if block is None:
            return self._on_heap(nbytes)
        if block.run != run:
            block = self._zeroed(block, run)
        self._trimmer.start()
        return self._segment(block, nbytes)

    def recycle(self, nbytes: int, *, run: str) -> Segment | None:
        """A segment that the same ``run`` has used, if there is one to be had without waiting for anything."""
        if not self._lock.acquire(blocking=False):
            return None
        try:
            self._take_in()
            block = self._recycled(size_class(nbytes), run, own=True) if nbytes else None
        finally:
            self._lock.release()
        return self._segment(block, nbytes) if block is not None else None

    def _populated(self, block: _Block) -> _Block | None:
        """A block that has its memory now, which takes long; None if the machine has none left."""
        assert self._arena is not None
        try:
            self._arena.populate(block.start, PAGE + block.nbytes)
        except BaseException as error:
            with self._lock:
                self._space.give(block.start, PAGE + block.nbytes)
                self._count(held=-block.nbytes, fresh=-1)
            if isinstance(error, NoRoom):
                return None
            raise
        return block

    def _zeroed(self, block: _Block, run: str) -> _Block:
        """A block of another run, with nothing of that run left in it."""
        assert self._arena is not None
        self._arena.view(block.start + PAGE, block.nbytes)[:] = 0
        return replace(block, run=run)

    def adopt(self, name: BlockName, nbytes: int, *, run: str) -> Segment | None:
        """The segment in an idle block that a client has claimed and filled; None if it has not."""
        with self._lock:
            for block in self._oldest():
                if block.start == name.start and block.run == run and nbytes <= block.nbytes:
                    if self._arena is None or not self._arena.taken(name):
                        return None
                    self._idle[block.nbytes].remove(block)
                    self._count(held=block.nbytes, idle=-block.nbytes, recycled=1)
                    return self._segment(block, nbytes)
        return None

    def _segment(self, block: _Block, nbytes: int) -> Segment:
        assert self._arena is not None
        memory = self._arena.view(block.start + PAGE, nbytes)
        _when_dead(memory, self._returned.append, block)
        return Segment(memory=memory, place=self._arena.place(block.start, nbytes))

    def trim(self, *, idle_seconds: float | None = None) -> None:
        """Give memory back to the machine that was idle for so long."""
        with self._lock:
            self._take_in(lingering=True)
            limit = self._clock() - (self._idle_seconds if idle_seconds is None else idle_seconds)
            for block in self._oldest():
                if block.idle_since <= limit:
                    self._forget(block)

    # All below is called with the lock held

    def _count(self, **change: int) -> None:
        self._usage = self._usage.plus(**change)
        self._water.note(self._usage.held)

    def _take_in(self, *, lingering: bool = False) -> None:
        """Take in the blocks whose last view has died, except those that another process still uses.

        With ``lingering``, ask once more for those that one used when it was asked before.
        """
        waiting: list[_Block] = []
        if lingering:
            waiting, self._lingering = self._lingering, []
        while self._returned:
            returned = self._returned.popleft()
            if isinstance(returned, int):
                self._count(held=-returned)
            else:
                waiting.append(returned)
        for block in waiting:
            if self._arena is not None and self._arena.reclaim(block.start, block.nbytes, block.run):
                self._count(held=-block.nbytes, idle=block.nbytes)
                idle = self._idle.setdefault(block.nbytes, deque())
                idle.append(replace(block, idle_since=self._clock()))
            else:
                self._lingering.append(block)

    def _recycled(self, nbytes: int, run: str, *, own: bool = False) -> _Block | None:
        """An idle block of this class or one of the next few, one of the same run if there is one, or only an ``own`` one."""
        fitting = [
            block
            for size, blocks in self._idle.items()
            if nbytes <= size <= largest_for(nbytes)
            for block in blocks
            if block.run == run or not own
        ]
        for block in sorted(fitting, key=lambda one: (one.nbytes, one.run != run, -one.idle_since)):
            if self._withdrawn(block):
                self._count(held=block.nbytes, recycled=1)
                return block
        return None

    def _withdrawn(self, block: _Block) -> bool:
        """Whether a block is idle no more and nobody's; false if a client has it."""
        if self._arena is None or not self._arena.withdraw(block.start):
            return False
        self._idle[block.nbytes].remove(block)
        self._count(idle=-block.nbytes)
        return True

    def _fresh(self, nbytes: int, run: str) -> _Block | None:
        """A block with new memory; None if the arena has no room for it and the budget has."""
        self._make_room(nbytes, keep=self._water.worth_keeping)
        start = self._space.take(PAGE + nbytes)
        if start is None or self._arena is None:
            return None
        self._count(held=nbytes, fresh=1)
        return _Block(start=start, nbytes=nbytes, run=run)

    def _make_room(self, nbytes: int, *, keep: int | None = None) -> None:
        """Give idle memory back until ``nbytes`` fit into the total, and into ``keep``; raises `NoRoom` for the total."""
        limit = self.total if keep is None else min(keep, self.total)
        for block in self._oldest() if self._usage.held + nbytes <= self.total else []:
            if self._usage.held + self._usage.idle + nbytes <= limit:
                break
            self._forget(block)
        if (used := self._usage.held + self._usage.idle) + nbytes > self.total:
            raise NoRoom(f"a segment of {nbytes} bytes does not fit: {used} of {self.total} are in use")

    def _oldest(self) -> list[_Block]:
        """All idle blocks, the longest idle first."""
        return sorted(itertools.chain.from_iterable(self._idle.values()), key=lambda block: block.idle_since)

    def _forget(self, block: _Block) -> None:
        """Give the memory of an idle block back, unless a client has taken it."""
        if self._arena is not None and self._withdrawn(block):
            self._arena.forget(block.start, PAGE + block.nbytes)
            self._space.give(block.start, PAGE + block.nbytes)

    # All below is called without the lock

    def _on_heap(self, nbytes: int) -> Segment:
        """A segment that is not pooled: a small one, or one for which the arena has no room."""
        with self._lock:
            self._take_in()
            self._make_room(nbytes)
            self._count(held=nbytes)
        try:
            memory = aligned_empty(nbytes)
        except MemoryError:
            self._returned.append(nbytes)
            raise NoRoom(f"the machine has no {nbytes} bytes of memory left") from None
        _when_dead(memory.base if memory.base is not None else memory, self._returned.append, nbytes)
        return Segment(memory=memory)


def _when_dead(memory: Payload, call: Callable[[_Block | int], None], argument: _Block | int) -> None:
    weakref.finalize(memory, call, argument).atexit = False
