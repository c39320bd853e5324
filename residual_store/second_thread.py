"""The second thread: works beside the caller's, on another core."""

from __future__ import annotations

import concurrent.futures
import contextlib
import ctypes
import os
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from residual_store.closing import ClosedAtExit

__all__ = ["SecondThread", "wait_for_end"]


class SecondThread(ClosedAtExit):
    """A thread that is started when it is first needed, and again after a fork.

    It wakes up on another core than that of the caller, if the caller may use more than one, and may then run on all of them.
    A kernel that finds all cores busy for a moment would put both threads on one, and leave them there for several slices
    of time, although the other core is idle again long before.

    >>> with SecondThread() as second:
    ...     second.start(lambda: 1 + 1).result()
    2
    """

    def __init__(self) -> None:
        self._worker: _Worker | None = None
        self._core_of_caller: Callable[[], int] = ctypes.CDLL(None).sched_getcpu

    def close(self) -> None:
        """End the thread, once it has done what was started."""
        if self._worker is not None:
            self._worker.pool.shutdown(wait=False)
            self._worker = None

    def start[T](self, work: Callable[[], T]) -> Future[T] | None:
        """What will have the result of ``work``; None if Python is about to end and starts nothing in threads any more."""
        worker = self._worker
        if worker is None or worker.process != os.getpid():
            # After a fork the thread is the parent's.
            worker = self._worker = _Worker.started()
        cores = os.sched_getaffinity(0)
        # Before it wakes up: it would not come to do that itself for as long as the caller's thread keeps the core busy.
        worker.move(cores - {self._core_of_caller()})
        try:
            return worker.pool.submit(_on, cores, work)
        except RuntimeError:
            return None


@dataclass(frozen=True, eq=False)
class _Worker:
    """A pool of one thread; what the kernel calls that is in ``threads`` as soon as it runs."""

    pool: ThreadPoolExecutor
    threads: list[int]
    process: int

    @classmethod
    def started(cls) -> _Worker:
        threads: list[int] = []
        note = lambda: threads.append(threading.get_native_id())  # noqa: E731
        return cls(ThreadPoolExecutor(1, "residual-store-copier", initializer=note), threads, os.getpid())

    def move(self, cores: set[int]) -> None:
        for thread in self.threads:
            with contextlib.suppress(OSError):
                os.sched_setaffinity(thread, cores)


def _on[T](cores: set[int], work: Callable[[], T]) -> T:
    """Do the work where the caller may run: what it starts is bound no more than what the caller starts."""
    with contextlib.suppress(OSError):
        os.sched_setaffinity(0, cores)
    return work()


def wait_for_end(work: Future[Any], stop: Callable[[], object]) -> None:
    """Wait until ``work`` has ended; an interrupt in between asks it to ``stop``, and is raised when it has."""
    try:
        concurrent.futures.wait([work])
    except BaseException:
        stop()
        wait_for_end(work, stop)
        raise
