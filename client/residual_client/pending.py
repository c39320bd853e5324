"""Pending adjoints: what a forward has started and a backward may come for, bounded in number and in time."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

__all__ = ["Pending", "PendingAdjoints"]


class Pending(Protocol):
    """An adjoint that is being computed; `concurrent.futures.Future` is one."""

    def result(self, timeout: float | None = None) -> Any:
        """The gradient, a pytree like the input; raises what the adjoint raised, or TimeoutError."""

    def cancel(self) -> bool:
        """Do not start it, if it has not started yet."""


@dataclass
class _Entry:
    adjoints: Sequence[Pending]
    since: float
    used: bool = False
    waiting: int = 0


class PendingAdjoints:
    """The adjoints of up to ``most`` forwards by key, each for at most ``seconds`` seconds.

    What a backward has used stays until the next forward, so that it can be applied again, and until nobody waits for it.
    ``expired`` counts the forwards whose backward did not come in time.

    >>> pending = PendingAdjoints(most=2, seconds=60)
    >>> for key in (b"a", b"b", b"c"):
    ...     pending.add(key, [])
    >>> with pending.used(b"a") as first, pending.used(b"c") as last:
    ...     first, last, pending.expired
    (None, [], 1)
    """

    def __init__(self, *, most: int, seconds: float) -> None:
        self._most = most
        self._seconds = seconds
        self._entries: dict[bytes, _Entry] = {}
        self._lock = threading.Lock()
        self.expired = 0

    def __len__(self) -> int:
        with self._lock:
            return sum(not entry.used for entry in self._entries.values())

    def add(self, key: bytes, adjoints: Sequence[Pending]) -> None:
        """Remember the adjoints of a forward; those of older ones are cancelled where a bound says so."""
        now = time.monotonic()
        with self._lock:
            self._entries[key] = _Entry(adjoints, now)
            dropped = self._over(now)
        _cancel(dropped)

    def _over(self, now: float) -> list[_Entry]:
        idle = {key: entry for key, entry in self._entries.items() if not entry.waiting}
        dropped = [self._entries.pop(key) for key, entry in idle.items() if entry.used]
        for key in [key for key, entry in idle.items() if not entry.used]:
            if len(self._entries) <= self._most and now - self._entries[key].since < self._seconds:
                break
            dropped.append(self._entries.pop(key))
            self.expired += 1
        return dropped

    @contextlib.contextmanager
    def used(self, key: bytes) -> Iterator[Sequence[Pending] | None]:
        """The adjoints of a forward, which nobody cancels meanwhile, or None if they have expired."""
        with self._lock:
            entry = self._entries.get(key)
            if entry is not None and time.monotonic() - entry.since >= self._seconds:
                entry = None
            if entry is not None:
                entry.used = True
                entry.waiting += 1
        try:
            yield None if entry is None else entry.adjoints
        finally:
            if entry is not None:
                with self._lock:
                    entry.waiting -= 1

    def clear(self) -> None:
        """Cancel all that nobody waits for."""
        with self._lock:
            dropped = [entry for entry in self._entries.values() if not entry.waiting]
            self._entries.clear()
        _cancel(dropped)


def _cancel(entries: Sequence[_Entry]) -> None:
    for entry in entries:
        for adjoint in entry.adjoints:
            adjoint.cancel()
