"""Arrivals: waking whoever waits for a bundle that is not there yet."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from concurrent.futures import Future

__all__ = ["Arrivals"]


class Arrivals:
    """Futures by key, each done when a bundle with that key is committed.

    >>> arrivals = Arrivals()
    >>> with arrivals.expected("run/a") as arrival:
    ...     arrivals.announce("run/a")
    ...     arrival.done()
    True
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: dict[str, set[Future[None]]] = {}

    @contextlib.contextmanager
    def expected(self, key: str) -> Iterator[Future[None]]:
        """A future for the next commit of ``key``; take it before you look, so that nothing slips between."""
        arrival: Future[None] = Future()
        with self._lock:
            self._waiting.setdefault(key, set()).add(arrival)
        try:
            yield arrival
        finally:
            with self._lock:
                others = self._waiting.get(key, set())
                others.discard(arrival)
                if not others:
                    self._waiting.pop(key, None)

    def announce(self, key: str) -> None:
        """Wake all who wait for ``key``."""
        with self._lock:
            for arrival in self._waiting.pop(key, set()):
                if arrival.set_running_or_notify_cancel():
                    arrival.set_result(None)
