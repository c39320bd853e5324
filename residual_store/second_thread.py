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

__all__ = ["SecondThread", "is_worth_two"]

_WORTH_TWO = 16 << 20
"""Bytes from which two threads are done sooner than one, although the second has to wake up."""


def is_worth_two(nbytes: int) -> bool:
    """Whether so many bytes are worth a second thread here."""
    return nbytes >= _WORTH_TWO and len(os.sched_getaffinity(0)) > 1


class SecondThread(ClosedAtExit):
    """A thread that is started when it is first needed, and again after a fork.

    It wakes up on another core than that of the caller, if the caller may use more than one, and may then run on all of them.
    A kernel that finds all cores busy for a moment would put both threads on one, and leave them there for several slices
    of time, although the other core is idle again long before.

    >>> done = []
    >>> with SecondThread() as second:
    ...     second.beside(lambda: done.append("mine"), lambda: done.append("theirs"), stop=lambda: None)
    >>> sorted(done)
    ['mine', 'theirs']
    """

    def __init__(self) -> None:
        self._worker: _Worker | None = None
        self._core_of_caller: Callable[[], int] = ctypes.CDLL(None).sched_getcpu

    def close(self) -> None:
        """End the thread, once it has done what was started."""
        if self._worker is not None:
            self._worker.pool.shutdown(wait=False)
            self._worker = None

    def beside(
        self, mine: Callable[[], object], theirs: Callable[[], object], *, stop: Callable[[], object]
    ) -> None:
        """Do ``mine`` in this thread and ``theirs`` in the other; in this one too if the other does not come to it.

        Returns, or raises the error of either, when both have ended: nobody goes on to write where the other has failed.
        ``stop`` asks them to end soon; it is called after an error, and after an interrupt while this waits.
        """
        helping = self.start(theirs)
        try:
            mine()
            if helping is None or helping.cancel():
                theirs()
        except BaseException:
            stop()
            raise
        finally:
            if helping is not None and not helping.cancel():
                _wait_for_end(helping, stop)
        try:
            if helping is not None and not helping.cancelled():
                helping.result()
        finally:
            # An error refers to this frame, which must not refer to the error.
            del helping

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


def _wait_for_end(work: Future[Any], stop: Callable[[], object]) -> None:
    """Wait until ``work`` has ended; an interrupt in between asks it to ``stop``, and is raised when it has."""
    try:
        concurrent.futures.wait([work])
    except BaseException:
        stop()
        _wait_for_end(work, stop)
        raise
