"""Segments: the host memory that bundles live in, one segment for each bundle.

Leaves are views into their segment.
A segment counts as held until the last view of it dies, wherever that view is, so the count is the memory in use.
"""

from __future__ import annotations

import threading
import weakref

from residual_store.bundle import Payload
from residual_store.errors import ResidualStoreError
from residual_store.frame import aligned_empty

__all__ = ["NoRoom", "SegmentPool"]


class NoRoom(ResidualStoreError):
    """A segment does not fit just now; the store makes room or answers with `StoreFull` or `Busy`."""


class SegmentPool:
    """Hands out segments within a total of bytes.

    >>> pool = SegmentPool(total=1 << 20)
    >>> segment = pool.allocate(1000)
    >>> pool.held
    1000
    >>> del segment
    >>> pool.held
    0
    """

    def __init__(self, *, total: int) -> None:
        self.total = total
        self._held = 0
        self._lock = threading.Lock()

    @property
    def held(self) -> int:
        """Bytes of all segments that some view still uses."""
        return self._held

    def allocate(self, nbytes: int) -> Payload:
        """A segment of ``nbytes`` uninitialized bytes, 64-byte aligned; raises `NoRoom`."""
        with self._lock:
            if self._held + nbytes > self.total:
                raise NoRoom(
                    f"a segment of {nbytes} bytes does not fit: {self._held} of {self.total} are held"
                )
            self._held += nbytes
        try:
            segment = aligned_empty(nbytes)
        except MemoryError:
            self._release(nbytes)
            raise NoRoom(f"the machine has no {nbytes} bytes of memory left") from None
        weakref.finalize(segment.base if segment.base is not None else segment, self._release, nbytes)
        return segment

    def _release(self, nbytes: int) -> None:
        with self._lock:
            self._held -= nbytes
