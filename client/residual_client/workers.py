"""Workers: a few threads for transfers, which end by themselves when there is nothing to do."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable

__all__ = ["Workers"]

_LINGER_SECONDS = 2.0


class Workers:
    """Runs tasks in the order in which they come, at most ``most`` at once.

    The threads are daemons, so that a program can end although a server does not answer; who submits says what is to be
    waited for.
    A task must not raise.

    >>> done = threading.Event()
    >>> Workers(most=2).submit(done.set)
    >>> done.wait(10)
    True
    """

    def __init__(self, *, most: int) -> None:
        self._most = max(most, 1)
        self._tasks: deque[Callable[[], None]] = deque()
        self._threads = 0
        self._idle = 0
        self._changed = threading.Condition()

    def submit(self, task: Callable[[], None]) -> None:
        """Run a task in another thread; in this one if there is none any more, as while Python ends."""
        if not self.take(task):
            task()

    def take(self, task: Callable[[], None]) -> bool:
        """Run a task in another thread; false if there is none any more."""
        with self._changed:
            self._tasks.append(task)
            if self._idle >= len(self._tasks):
                self._changed.notify()
                return True
            if self._threads >= self._most or self._started() or self._threads:
                return True
            self._tasks.remove(task)
            return False

    def _started(self) -> bool:
        """Start a thread, with the lock held; false if Python allows none."""
        thread = threading.Thread(target=self._run, daemon=True, name="residual-client-transfer")
        try:
            thread.start()
        except RuntimeError:
            return False
        self._threads += 1
        return True

    def _run(self) -> None:
        while (task := self._next()) is not None:
            task()
            del task

    def _next(self) -> Callable[[], None] | None:
        """The next task; None if there was none for a while, and then the thread is no longer counted."""
        with self._changed:
            self._idle += 1
            self._changed.wait_for(lambda: bool(self._tasks), _LINGER_SECONDS)
            self._idle -= 1
            if self._tasks:
                return self._tasks.popleft()
            self._threads -= 1
            return None
