"""The copier: copies leaves to where they stay, with a second thread where there is a second core."""

from __future__ import annotations

import os
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
        leaves = [LeafCopy(source, target, base=base, copied=copied) for source, target, base in copies]
        digests = [NO_DIGEST] * len(leaves)
        left = deque(range(len(leaves)))

        def work(take: Callable[[], int]) -> None:
            while left:
                try:
                    index = take()
                except IndexError:
                    return
                digests[index] = leaves[index].run()

        def work_and_help(take: Callable[[], int]) -> None:
            work(take)
            for leaf in leaves:
                leaf.help()

        helping = self._help(copies, lambda: work_and_help(left.pop))
        try:
            (work if helping is None else work_and_help)(left.popleft)
        finally:
            # Nobody may write to the targets after this call, and nothing may fail unseen.
            left.clear()
            if helping is not None and not helping.cancel():
                helping.result()
        return digests

    def _help(self, copies: Sequence[Copy], work: Callable[[], None]) -> Future[None] | None:
        if sum(source.nbytes for source, *_ in copies) < _WORTH_IT or len(os.sched_getaffinity(0)) < 2:
            return None
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
