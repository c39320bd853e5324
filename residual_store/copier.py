"""The copier: copies and hashes leaves, with a second thread where there is a second core."""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

from residual_store.digest import NO_DIGEST, Copied, Payload, digest_of
from residual_store.leaf_copy import STREAMED_BYTES, LeafCopy, StreamedLeafCopy
from residual_store.second_thread import SecondThread, is_worth_two

__all__ = ["Copier", "Copy"]

type Copy = tuple[Payload, Payload, int]
"""Source, target, and where the target starts in the whole."""


class _Leaf(Protocol):
    """What two threads do with one leaf."""

    def run(self) -> bytes:
        """Do it, and return the digest; called once."""

    def help(self) -> None:
        """Do what the thread in `run` has not come to."""


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

    def __init__(self, *, streamed_bytes: int = STREAMED_BYTES) -> None:
        self._second = SecondThread()
        self._streamed_bytes = max(streamed_bytes, 1)

    def copy(self, copies: Sequence[Copy], *, copied: Copied = lambda start, stop: None) -> list[bytes]:
        """Make the ``copies`` and return their digests, in order; ``copied`` is told of each part, from any thread."""
        nbytes = sum(source.nbytes for source, *_ in copies)
        least = self._streamed_bytes if is_worth_two(nbytes) else math.inf
        streamed = {index: copy for index, copy in enumerate(copies) if copy[0].nbytes >= least}
        others = {index: copy for index, copy in enumerate(copies) if index not in streamed}
        digests: dict[int, bytes] = {}
        for index, (source, target, base) in streamed.items():
            leaf = partial(StreamedLeafCopy, source, target, base=base, copied=copied, piece=int(least))
            # One after the other: two threads that both hash first would only then begin to copy.
            digests[index] = self._run([leaf], nbytes)[0]
        leaves = [
            partial(LeafCopy, source, target, base=base, copied=copied)
            for source, target, base in others.values()
        ]
        digests |= zip(others, self._run(leaves, nbytes), strict=True)
        return [digests[index] for index in range(len(copies))]

    def digests(self, payloads: Sequence[Payload]) -> list[bytes]:
        """The digests of payloads that stay where they are, in order."""
        return self._run([partial(_Whole, payload) for payload in payloads], sum(map(len, payloads)))

    def _run(self, leaves: Sequence[Callable[[], _Leaf]], nbytes: int) -> list[bytes]:
        if not leaves or not is_worth_two(nbytes):
            return [leaf().run() for leaf in leaves]
        sharing = _Sharing(leaves)
        try:
            self._second.beside(sharing.from_the_start, sharing.from_the_end, stop=sharing.stop)
        finally:
            sharing.stop()
        return sharing.digests

    def close(self) -> None:
        """End the second thread."""
        self._second.close()


class _Whole:
    """A leaf that is hashed as a whole."""

    def __init__(self, payload: Payload) -> None:
        self._payload = payload

    def run(self) -> bytes:
        return digest_of(self._payload)

    def help(self) -> None:
        """Nobody can: each byte counts for the next one."""


class _Sharing:
    """The leaves that two threads share: those that nobody has begun, and those that somebody has."""

    def __init__(self, leaves: Sequence[Callable[[], _Leaf]]) -> None:
        self.digests = [NO_DIGEST] * len(leaves)
        self._leaves = leaves
        self._left = deque(range(len(leaves)))
        self._begun: list[_Leaf] = []
        self._beginning = threading.Lock()

    def from_the_start(self) -> None:
        """Do the first leaf that nobody has begun, again and again, and then help with those that are begun."""
        self._work(self._left.popleft)

    def from_the_end(self) -> None:
        """The same with the last leaf."""
        self._work(self._left.pop)

    def stop(self) -> None:
        """Begin no leaf any more, help with none, and keep none: what was submitted may run later, or never."""
        with self._beginning:
            self._left.clear()
            self._begun.clear()
            self._leaves = ()

    def _work(self, take: Callable[[], int]) -> None:
        while (begun := self._begin(take)) is not None:
            index, leaf = begun
            self.digests[index] = leaf.run()
        for leaf in self._begun:
            leaf.help()

    def _begin(self, take: Callable[[], int]) -> tuple[int, _Leaf] | None:
        # In one step, so that who finds no leaf left finds the others among those that are begun.
        with self._beginning:
            if not self._left:
                return None
            index = take()
            leaf = self._leaves[index]()
            self._begun.append(leaf)
            return index, leaf
