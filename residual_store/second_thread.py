"""The second thread: works beside the caller's, on another core."""

from __future__ import annotations

import contextlib
import ctypes
import os
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

from residual_store.closing import ClosedAtExit

__all__ = ["SecondThread"]


class SecondThread(ClosedAtExit):
    """A thread that is started when it is first needed, and again after a fork.

    It may run on each core that the caller's thread may run on, but for the one where that thread is just then.
    A kernel that finds all cores busy for a moment puts both on one core, and leaves them there for several slices of
    time, although the other core is idle again long before.

    >>> with SecondThread() as second:
    ...     second.start(lambda: 1 + 1).result()
    2
    """

    def __init__(self) -> None:
        self._pool: ThreadPoolExecutor | None = None
        self._process = 0
        self._thread: int | None = None
        self._core_of_caller: Callable[[], int] = ctypes.CDLL(None).sched_getcpu

    def close(self) -> None:
        """End the thread, once it has done what was started."""
        if self._pool is not None:
            self._pool.shutdown(wait=False)
            self._pool = None

    def start[T](self, work: Callable[[], T]) -> Future[T] | None:
        """What will have the result of ``work``; None if Python is about to end and starts nothing in threads any more."""
        if self._pool is None or self._process != os.getpid():
            # After a fork the thread is the parent's.
            self._thread, self._process = None, os.getpid()
            self._pool = ThreadPoolExecutor(1, "residual-store-copier", initializer=self._note)
        elif self._thread is not None:
            self._move(self._thread)
        try:
            return self._pool.submit(work)
        except RuntimeError:
            return None

    def _note(self) -> None:
        self._thread = threading.get_native_id()

    def _move(self, thread: int) -> None:
        # Before it wakes up: it would not come to do that itself for as long as the caller's thread keeps the core busy.
        with contextlib.suppress(OSError):
            os.sched_setaffinity(thread, os.sched_getaffinity(0) - {self._core_of_caller()})
