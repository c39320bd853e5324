"""The copier: copies leaves to where they stay, with a second thread where there is a second core."""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from residual_store.digest import NO_DIGEST, Copied, Payload
from residual_store.leaf_copy import LeafCopy

__all__ = ["Copier", "Copy"]

type Copy = tuple[Payload, Payload, int]
"""Source, target, and where the target starts in the whole."""

_WORTH_IT = 16 << 20


class Copier:
    """Copies leaves and takes their digests; one copier serves any number of threads.

    One core copies and hashes at 0.9 of memcpy, two at 1.1, as memory has room for more than one core can ask for.
    The second thread takes leaves from the end and the caller's from the start, and who finds none left helps the other,
    so that neither waits for long where the other core is busy.

    >>> source, target = np.arange(3, dtype=np.uint8), np.empty(3, np.uint8)
    >>> digest, = Copier().copy([(source, target, 0)])
    >>> len(digest), target
    (16, array([0, 1, 2], dtype=uint8))
    """

    def __init__(self) -> None:
        self._second: ThreadPoolExecutor | None = None
        self._process = 0

    def copy(self, copies: Sequence[Copy], *, copied: Copied = lambda start, stop: None) -> list[bytes]:
        """Make the ``copies`` and return their digests, in order; ``copied`` is told of each part, from any thread."""
        if not self._is_worth_a_thread(copies):
            return [
                LeafCopy(source, target, base=base, copied=copied).run() for source, target, base in copies
            ]
        copying = _Copying(copies, copied)
        helping = self._start(copying.from_the_end)
        try:
            copying.from_the_start()
        finally:
            # Nobody may write to the targets after this call, and nothing may fail unseen.
            copying.stop()
            if helping is not None and not helping.cancel():
                helping.result()
        return copying.digests

    def _is_worth_a_thread(self, copies: Sequence[Copy]) -> bool:
        return sum(source.nbytes for source, *_ in copies) >= _WORTH_IT and len(os.sched_getaffinity(0)) > 1

    def _start(self, work: Callable[[], None]) -> Future[None] | None:
        if self._second is None or self._process != os.getpid():
            # After a fork the thread is the parent's.
            self._second, self._process = ThreadPoolExecutor(1, "residual-store-copier"), os.getpid()
        try:
            return self._second.submit(work)
        except RuntimeError:
            # Python is about to end and starts nothing in pools any more; the caller's thread does all of it.
            return None

    def close(self) -> None:
        """End the second thread."""
        if self._second is not None:
            self._second.shutdown(wait=False)
            self._second = None


class _Copying:
    """The leaves that are to be copied, and those that are being copied."""

    def __init__(self, copies: Sequence[Copy], copied: Copied) -> None:
        self.digests = [NO_DIGEST] * len(copies)
        self._copies, self._copied = copies, copied
        self._left = deque(range(len(copies)))
        self._begun: list[LeafCopy] = []
        self._beginning = threading.Lock()

    def from_the_start(self) -> None:
        """Copy the first leaf that nobody has begun, again and again, and then help with those that are begun."""
        self._work(self._left.popleft)

    def from_the_end(self) -> None:
        """The same with the last leaf."""
        self._work(self._left.pop)

    def stop(self) -> None:
        """Begin no leaf any more."""
        self._left.clear()

    def _work(self, take: Callable[[], int]) -> None:
        while (begun := self._begin(take)) is not None:
            index, leaf = begun
            self.digests[index] = leaf.run()
        for leaf in self._begun:
            leaf.help()

    def _begin(self, take: Callable[[], int]) -> tuple[int, LeafCopy] | None:
        # In one step, so that who finds no leaf left finds the others among those that are begun.
        with self._beginning:
            if not self._left:
                return None
            index = take()
            source, target, base = self._copies[index]
            leaf = LeafCopy(source, target, base=base, copied=self._copied)
            self._begun.append(leaf)
            return index, leaf
