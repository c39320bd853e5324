"""One lock for each key that is being written."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

__all__ = ["KeyLocks"]


class KeyLocks:
    """Keeps two writers of one key apart, and holds a lock only for keys in use.

    >>> locks = KeyLocks()
    >>> with locks.of("run/a"), locks.of("run/b"):
    ...     pass
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._locks: dict[str, tuple[threading.RLock, int]] = {}

    @contextlib.contextmanager
    def of(self, key: str) -> Iterator[None]:
        """Hold the lock of ``key``, which the same thread may take again."""
        with self._lock:
            lock, users = self._locks.get(key, (threading.RLock(), 0))
            self._locks[key] = (lock, users + 1)
        try:
            with lock:
                yield
        finally:
            with self._lock:
                lock, users = self._locks.pop(key)
                if users > 1:
                    self._locks[key] = (lock, users - 1)
