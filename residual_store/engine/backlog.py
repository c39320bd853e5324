"""The backlog: keys for which the index may not say what the store holds."""

from __future__ import annotations

import logging
import threading
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable

from residual_store.errors import ResidualStoreError

__all__ = ["Backlog"]

log = logging.getLogger("residual_store")


class Backlog:
    """Settles keys one by one in a thread of its own, and at once those that somebody asks for.

    A key leaves when ``settle`` has returned for it, so what is not in the backlog is told by the index.
    Settling a key twice does no harm.

    >>> backlog = Backlog({"run/b", "run/a"}, settle=print, retry_seconds=1.0)
    >>> backlog.settle("run/b")
    run/b
    >>> backlog.first(prefix="run/", after="", count=10)
    ['run/a']
    """

    def __init__(self, keys: Iterable[str], *, settle: Callable[[str], object], retry_seconds: float) -> None:
        self._keys = sorted(keys)
        self._settle = settle
        self._retry_seconds = retry_seconds
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._work_off, name="residual-store-backlog", daemon=True)

    def start(self) -> None:
        """Begin to settle all keys in the background."""
        if self._keys:
            self._thread.start()

    def close(self) -> None:
        """Stop after the key that is being settled."""
        self._closing.set()
        if self._thread.is_alive():
            self._thread.join()

    @property
    def closing(self) -> bool:
        """Whether it has been told to stop."""
        return self._closing.is_set()

    def __len__(self) -> int:
        return len(self._keys)

    def __contains__(self, key: str) -> bool:
        with self._lock:
            return self._place(key) is not None

    def first(self, *, prefix: str, after: str, count: int) -> list[str]:
        """The first ``count`` keys after ``after`` that start with ``prefix``."""
        with self._lock:
            start = max(bisect_right(self._keys, after), bisect_left(self._keys, prefix))
            return [key for key in self._keys[start : start + count] if key.startswith(prefix)]

    def settle(self, key: str) -> None:
        """Settle one key now, on the caller's thread; what goes wrong is raised, and the key stays."""
        self._settle(key)
        with self._lock:
            if (place := self._place(key)) is not None:
                del self._keys[place]

    def _place(self, key: str) -> int | None:
        place = bisect_left(self._keys, key)
        return place if self._keys[place : place + 1] == [key] else None

    def _work_off(self) -> None:
        while self._keys:
            for key in list(self._keys):
                if self.closing:
                    return
                if key in self and not self._can_settle(key):
                    self._closing.wait(self._retry_seconds)

    def _can_settle(self, key: str) -> bool:
        try:
            self.settle(key)
        except ResidualStoreError as error:
            log.warning("the index of %r is made later: %s", key, error)
            return False
        return True
