"""Loans: segments that clients on the same host fill themselves, before a put names them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from residual_store.errors import SegmentUnavailable
from residual_store.place import Place
from residual_store.segments import Segment

__all__ = ["Loans"]


@dataclass(frozen=True)
class _Loan:
    key: str
    segment: Segment
    since: float


class Loans:
    """Segments by ticket, each lent for one put of one key, for ``seconds`` at most.

    Of a loan that has ended nothing is in danger while its borrower goes on writing: the pool does not use a segment again
    while another process has it.
    """

    def __init__(self, *, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._seconds = seconds
        self._clock = clock
        self._lock = threading.Lock()
        self._loans: dict[str, _Loan] = {}

    def lend(self, key: str, segment: Segment) -> Place:
        """Keep a segment for the put of ``key``; raises `SegmentUnavailable` if no other process can reach it."""
        if segment.place is None:
            raise SegmentUnavailable("there is no shared memory for this segment; send the bytes in the body")
        with self._lock:
            self._loans[segment.place.ticket] = _Loan(key, segment, self._clock())
        return segment.place

    def take(self, key: str, ticket: str) -> Segment:
        """The segment that was lent for ``key``, once; raises `SegmentUnavailable`."""
        with self._lock:
            loan = self._loans.get(ticket)
            if loan is None or loan.key != key:
                raise SegmentUnavailable(
                    "this segment was not lent for this key, or not any more; send the bytes in the body"
                )
            del self._loans[ticket]
        return loan.segment

    def give_back(self, key: str, ticket: str) -> None:
        """End a loan that is not needed; one that has ended already is no error."""
        with self._lock:
            loan = self._loans.get(ticket)
            if loan is not None and loan.key == key:
                del self._loans[ticket]

    def end_old(self) -> None:
        """End the loans whose time is over: their borrowers are dead or stalled."""
        limit = self._clock() - self._seconds
        with self._lock:
            for ticket in [ticket for ticket, loan in self._loans.items() if loan.since < limit]:
                del self._loans[ticket]
