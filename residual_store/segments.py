"""Segments: the host memory that bundles live in, one segment for each bundle, pooled and used again.

Leaves are views into their segment.
A segment comes back to the pool when the last view of it dies, wherever that view is: the garbage collector is the
reference count.
Fresh memory costs six to ten times what a copy into it costs, so the pool keeps what comes back, in classes of size, for
as long as somebody may want it again.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from residual_store.arena import PAGE, AddressSpace, Arena, NoRoom, PrivateArena, arena_bytes
from residual_store.bundle import Payload
from residual_store.frame import aligned_empty
from residual_store.place import Place

__all__ = ["NoRoom", "PoolUsage", "Segment", "SegmentPool", "size_class"]

_CLASSES_PER_DOUBLING = 32
_SPARE_CLASSES = 4


@dataclass(frozen=True, kw_only=True, eq=False)
class Segment:
    """Memory for the leaf area of one bundle.

    ``memory`` is page-aligned if the segment is pooled, and 64-byte aligned if it is a small one; it is not zeroed.
    ``place`` says where other processes of this host find it, if they can.
    """

    memory: Payload
    place: Place | None = None


@dataclass(frozen=True)
class PoolUsage:
    """``held`` bytes have a view somewhere, ``idle`` bytes wait to be used again.

    ``fresh`` and ``recycled`` count the segments that were handed out, by whether their memory was new.
    """

    held: int
    idle: int
    fresh: int
    recycled: int


@dataclass(frozen=True, kw_only=True, eq=False)
class _Block:
    """A part of the arena: a page for the ticket, and ``nbytes`` for a leaf area."""

    start: int
    nbytes: int
    run: str
    idle_since: float = 0.0


@dataclass
class _Blocks:
    """What is known of the blocks of one pool; its lock is held while this changes."""

    space: AddressSpace
    idle: dict[int, deque[_Block]] = field(default_factory=dict)
    lingering: list[_Block] = field(default_factory=list)
    """Blocks without a view in this process that another process still uses."""


def size_class(nbytes: int) -> int:
    """The length of the blocks for ``nbytes``: at most a 32nd more, in whole pages.

    >>> size_class(128 << 20) >> 20, size_class(100_000)
    (128, 102400)
    """
    step = max((1 << nbytes.bit_length() - 1) // _CLASSES_PER_DOUBLING, PAGE)
    return -(-nbytes // step) * step


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
        self._arena = arena if arena is not None else _private_arena(total)
        self._smallest = smallest
        self._idle_seconds = idle_seconds
        self._clock = clock
        self._blocks = _Blocks(AddressSpace(self._arena.nbytes if self._arena is not None else 0))
        self._usage = PoolUsage(0, 0, 0, 0)
        self._lock = threading.Lock()
        # Views die at any moment, in any thread, so what they leave is only noted, and taken in at the next call.
        self._returned: deque[_Block | int] = deque()
        self._trimmer: threading.Thread | None = None

    @property
    def usage(self) -> PoolUsage:
        """What the pool holds just now."""
        with self._lock:
            self._take_in(lingering=True)
            return self._usage

    @property
    def held(self) -> int:
        """Bytes of all segments that some view still uses."""
        return self.usage.held

    def close(self) -> None:
        """Let go of the arena; segments stay valid."""
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
            block = self._recycled(size, run)
            if block is None:
                self._take_in(lingering=True)
                block = self._recycled(size, run) or self._fresh(size, run)
        if block is None or self._arena is None:
            return self._on_heap(nbytes)
        memory = self._arena.view(block.start + PAGE, nbytes)
        if block.run != run:
            memory[:] = 0
        place = self._arena.place(block.start, nbytes)
        _when_dead(memory, self._returned.append, replace(block, run=run))
        self._start_trimmer()
        return Segment(memory=memory, place=place)

    def trim(self, *, idle_seconds: float | None = None) -> None:
        """Give memory back to the machine that was idle for so long."""
        with self._lock:
            self._take_in(lingering=True)
            limit = self._clock() - (self._idle_seconds if idle_seconds is None else idle_seconds)
            for blocks in list(self._blocks.idle.values()):
                while blocks and blocks[0].idle_since <= limit:
                    self._forget(blocks.popleft())

    # All below is called with the lock held

    def _count(self, *, held: int = 0, idle: int = 0, fresh: int = 0, recycled: int = 0) -> None:
        before = self._usage
        totals = (before.held + held, before.idle + idle, before.fresh + fresh, before.recycled + recycled)
        self._usage = PoolUsage(*totals)

    def _take_in(self, *, lingering: bool = False) -> None:
        """Take in the blocks whose last view has died, except those that another process still uses.

        With ``lingering``, ask once more for those that one used when it was asked before.
        """
        waiting: list[_Block] = []
        if lingering:
            waiting, self._blocks.lingering = self._blocks.lingering, []
        while self._returned:
            returned = self._returned.popleft()
            if isinstance(returned, int):
                self._count(held=-returned)
            else:
                waiting.append(returned)
        for block in waiting:
            if self._arena is not None and self._arena.reclaim(block.start):
                self._count(held=-block.nbytes, idle=block.nbytes)
                idle = self._blocks.idle.setdefault(block.nbytes, deque())
                idle.append(replace(block, idle_since=self._clock()))
            else:
                self._blocks.lingering.append(block)

    def _recycled(self, nbytes: int, run: str) -> _Block | None:
        """An idle block of this class or one of the next few, one of the same run if there is one."""
        for size in sorted(size for size, blocks in self._blocks.idle.items() if blocks):
            if nbytes <= size <= nbytes + _SPARE_CLASSES * nbytes // _CLASSES_PER_DOUBLING:
                blocks = self._blocks.idle[size]
                block = next((block for block in reversed(blocks) if block.run == run), blocks[-1])
                blocks.remove(block)
                self._count(held=size, idle=-size, recycled=1)
                return block
        return None

    def _fresh(self, nbytes: int, run: str) -> _Block | None:
        """A block with new memory; None if the arena has no room for it and the budget has."""
        self._make_room(nbytes)
        start = self._blocks.space.take(PAGE + nbytes)
        if start is None or self._arena is None:
            return None
        try:
            self._arena.populate(start, PAGE + nbytes)
        except NoRoom:
            self._blocks.space.give(start, PAGE + nbytes)
            return None
        self._count(held=nbytes, fresh=1)
        return _Block(start=start, nbytes=nbytes, run=run)

    def _make_room(self, nbytes: int) -> None:
        """Give idle memory back until ``nbytes`` fit into the total; raises `NoRoom`."""
        if self._usage.held + nbytes > self.total:
            raise NoRoom(
                f"a segment of {nbytes} bytes does not fit: {self._usage.held} of {self.total} are held"
            )
        while self._usage.held + self._usage.idle + nbytes > self.total:
            self._forget(
                min((b for b in self._blocks.idle.values() if b), key=lambda b: b[0].idle_since).popleft()
            )

    def _forget(self, block: _Block) -> None:
        assert self._arena is not None
        self._arena.forget(block.start, PAGE + block.nbytes)
        self._blocks.space.give(block.start, PAGE + block.nbytes)
        self._count(idle=-block.nbytes)

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

    def _start_trimmer(self) -> None:
        """Have a thread that trims for as long as the pool has blocks."""
        with self._lock:
            if self._trimmer is None:
                arguments = (weakref.ref(self), self._idle_seconds)
                self._trimmer = threading.Thread(target=_trim_now_and_then, args=arguments, daemon=True)
                self._trimmer.start()

    def _end_trimmer(self) -> bool:
        """Whether there is nothing left to trim, so that the thread may end."""
        with self._lock:
            if self._usage.held or self._usage.idle:
                return False
            self._trimmer = None
            return True


def _private_arena(total: int) -> Arena | None:
    """An arena of this process; None where the machine allows no such range."""
    try:
        return PrivateArena(arena_bytes(total))
    except (OSError, ValueError, OverflowError):
        return None


def _when_dead(memory: Payload, call: Callable[[_Block | int], None], argument: _Block | int) -> None:
    weakref.finalize(memory, call, argument).atexit = False


def _trim_now_and_then(pool_of: weakref.ref[SegmentPool], idle_seconds: float) -> None:
    wait = threading.Event()
    while True:
        wait.wait(max(idle_seconds / 4, 0.05))
        pool = pool_of()
        if pool is None:
            return
        pool.trim()
        if pool._end_trimmer():
            return
        del pool
