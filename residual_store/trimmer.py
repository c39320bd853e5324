"""The trimmer: a thread that gives a pool's idle memory back, for as long as the pool has any."""

from __future__ import annotations

import threading
import weakref
from typing import Protocol

__all__ = ["Trimmer"]


class Pool(Protocol):
    """What a trimmer knows of a pool."""

    def trim(self) -> None:
        """Give memory back that was idle for long."""

    @property
    def is_empty(self) -> bool:
        """Whether there is no block any more, neither held nor idle."""


class Trimmer:
    """Trims ``pool`` several times in ``idle_seconds``; the thread does not keep the pool alive."""

    def __init__(self, pool: Pool, *, idle_seconds: float) -> None:
        self._pool = weakref.ref(pool)
        self._pause = max(idle_seconds / 4, 0.05)
        self._lock = threading.Lock()
        self._runs = False

    def start(self) -> None:
        """Have the thread run."""
        with self._lock:
            if not self._runs:
                self._runs = True
                threading.Thread(target=self._run, daemon=True, name="residual-store-trimmer").start()

    def _run(self) -> None:
        wait = threading.Event()
        while not wait.wait(self._pause):
            pool = self._pool()
            if pool is None:
                return
            pool.trim()
            with self._lock:
                # With the lock, so that a block that is made now starts the next thread.
                if pool.is_empty:
                    self._runs = False
                    return
            del pool
