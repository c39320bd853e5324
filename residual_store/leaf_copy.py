"""The copy of one leaf, which takes its digest on the way and lets another thread help."""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections import deque

import numpy as np
import xxhash

from residual_store.digest import Copied, Payload, digest_of

__all__ = ["STREAMED_BYTES", "LeafCopy", "StreamedLeafCopy"]

_BLOCK = 512 << 10
"""Bytes that stay in the cache of a core between being copied and being hashed."""

_PART = 8 << 20
"""Bytes that stay in the cache which the cores share between being copied by one and being hashed by another."""

STREAMED_BYTES = 192 << 20
"""Bytes from which glibc's ``memcpy`` writes past the caches: three quarters of the largest cache, here for one of 256 MiB."""


class _Part:
    """A run of bytes of which one thread takes blocks from the start, and another one from the end."""

    def __init__(self, source: Payload, target: Payload) -> None:
        self._source, self._target = source, target
        self._left = deque(range(0, source.nbytes, _BLOCK))
        self._helping = threading.Lock()
        self._helped_from = self.nbytes = source.nbytes

    def run(self, digest: xxhash.xxh3_128) -> None:
        """Copy, and hash what is in the target then."""
        source, target, take = self._source, self._target, self._left.popleft
        with contextlib.suppress(IndexError):
            while True:
                start = take()
                block = target[start : start + _BLOCK]
                # Lets other threads run meanwhile, which an assignment to a memoryview does not.
                np.copyto(block, source[start : start + _BLOCK])
                digest.update(block)
        with self._helping:
            # What the other thread has taken is there now.
            helped = target[self._helped_from :]
        if helped.nbytes:
            digest.update(helped)

    def help(self) -> None:
        """Copy what the thread in `run` has not come to."""
        with self._helping, contextlib.suppress(IndexError):
            while True:
                start = self._helped_from = self._left.pop()
                np.copyto(self._target[start : start + _BLOCK], self._source[start : start + _BLOCK])


class LeafCopy:
    """Copies ``source`` to ``target`` of the same length, once.

    It takes little longer than the copy, because each block is hashed while it is in the cache.
    ``copied`` is called with the start and the end of each part that has been copied, counted from ``base``.

    >>> target = np.empty(3, np.uint8)
    >>> LeafCopy(np.arange(3, dtype=np.uint8), target).run() == digest_of(bytes([0, 1, 2]))
    True
    """

    def __init__(
        self,
        source: Payload,
        target: Payload,
        *,
        base: int = 0,
        copied: Copied = lambda start, stop: None,
    ) -> None:
        self._source, self._target = source, target
        self._base, self._copied = base, copied
        cuts = range(0, source.nbytes if source.nbytes > _BLOCK else 0, _PART)
        self._parts = [_Part(source[cut : cut + _PART], target[cut : cut + _PART]) for cut in cuts]

    def run(self) -> bytes:
        """Copy, and return the digest of what is in the target then."""
        if not self._parts:
            return self._at_once()
        digest, start = xxhash.xxh3_128(), self._base
        for part in self._parts:
            part.run(digest)
            self._copied(start, start + part.nbytes)
            start += part.nbytes
        return digest.digest()

    def _at_once(self) -> bytes:
        self._target[:] = self._source
        self._copied(self._base, self._base + self._source.nbytes)
        return digest_of(self._target)

    def help(self) -> None:
        """Copy what the thread in `run` has not come to, if there is any; for one other thread."""
        for part in self._parts:
            part.help()


class StreamedLeafCopy:
    """The same for a very large leaf, of which one thread takes the digest while the other one copies.

    ``memcpy`` writes past the caches from some length on, which is a third faster than two threads that copy block by
    block; so it is called with pieces of at least ``piece`` bytes.
    What it has read is in the cache which the cores share, where the other thread hashes it.
    The digest is that of the source, so a leaf that is changed meanwhile, which nobody may do, is found to be damaged later.
    """

    def __init__(self, source: Payload, target: Payload, *, base: int, copied: Copied, piece: int) -> None:
        self._source, self._target = source, target
        self._base, self._copied = base, copied
        count = max(source.nbytes // piece, 1)
        cuts = [source.nbytes * index // count for index in range(count + 1)]
        self._left = deque(itertools.pairwise(cuts))
        self._copying = threading.Lock()

    def run(self) -> bytes:
        """Hash, copy what no other thread has, and return the digest."""
        digest = digest_of(self._source)
        self.help()
        return digest

    def help(self) -> None:
        """Copy what is left, or wait until another thread has."""
        with self._copying:
            while self._left:
                start, stop = self._left.popleft()
                np.copyto(self._target[start:stop], self._source[start:stop])
                self._copied(self._base + start, self._base + stop)
