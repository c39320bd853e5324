"""Pending adjoints: what a forward has started and a backward may come for, bounded in number and in time."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
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


class PendingAdjoints:
    """The adjoints of up to ``most`` forwards by key, each for at most ``seconds`` seconds.

    What a backward has used stays until the next forward, so that it can be applied again.
    ``expired`` counts the forwards whose backward did not come in time.

    >>> pending = PendingAdjoints(most=2, seconds=60)
    >>> for key in (b"a", b"b", b"c"):
    ...     pending.add(key, [])
    >>> pending.use(b"a"), pending.use(b"c"), pending.expired
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
        dropped = [self._entries.pop(key) for key, entry in list(self._entries.items()) if entry.used]
        while self._entries:
            key, oldest = next(iter(self._entries.items()))
            if len(self._entries) <= self._most and now - oldest.since < self._seconds:
                break
            dropped.append(self._entries.pop(key))
            self.expired += 1
        return dropped

    def use(self, key: bytes) -> Sequence[Pending] | None:
        """The adjoints of a forward, or None if they have expired."""
        with self._lock:
            entry = self._entries.get(key)
            if entry is None or time.monotonic() - entry.since >= self._seconds:
                return None
            entry.used = True
            return entry.adjoints

    def clear(self) -> None:
        """Cancel all."""
        with self._lock:
            dropped = list(self._entries.values())
            self._entries.clear()
        _cancel(dropped)


def _cancel(entries: Sequence[_Entry]) -> None:
    for entry in entries:
        for adjoint in entry.adjoints:
            adjoint.cancel()
