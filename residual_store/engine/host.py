"""The host tier: bundles in this process's memory."""

from __future__ import annotations

import threading
from collections import OrderedDict
from dataclasses import dataclass, replace

from residual_store.bundle import Bundle
from residual_store.engine.index import Entry, Index
from residual_store.store import Stat

__all__ = ["HostTier"]


@dataclass(frozen=True)
class _Held:
    bundle: Bundle
    ttl: float | None
    is_copy: bool


class HostTier:
    """A dictionary of bundles in the order of their arrival, with an index in memory.

    A bundle is the only one of its key, or a copy of one in the durable tier, which may be dropped at any time.
    """

    def __init__(self) -> None:
        self.index = Index(None, tier="host")
        self._held: OrderedDict[str, _Held] = OrderedDict()
        self._lock = threading.Lock()

    def close(self) -> None:
        self._held.clear()
        self.index.close()

    def put(self, stat: Stat, bundle: Bundle, *, ttl: float | None) -> None:
        """Hold a bundle that is nowhere else."""
        with self._lock:
            self._held[stat.key] = _Held(bundle, ttl, is_copy=False)
            self._held.move_to_end(stat.key)
            self.index.set(Entry(stat=stat))

    def put_copy(self, key: str, bundle: Bundle) -> None:
        """Hold a copy of a durable bundle; it does not show in listings."""
        with self._lock:
            self._held.setdefault(key, _Held(bundle, None, is_copy=True))

    def get(self, key: str) -> Bundle | None:
        """The bundle or copy with this key, if it is here."""
        held = self._held.get(key)
        return None if held is None else held.bundle

    def remove(self, key: str) -> None:
        """Let go of a bundle or copy; its memory is free when its last view dies."""
        with self._lock:
            self._held.pop(key, None)
            self.index.remove(key)

    def drop_copy(self) -> bool:
        """Let go of the oldest copy; false if there is none."""
        with self._lock:
            key = next((key for key, held in self._held.items() if held.is_copy), None)
            if key is not None:
                del self._held[key]
            return key is not None

    def oldest(self) -> str | None:
        """The key that arrived first of those that are nowhere else: the backward pass wants it last."""
        return next((key for key, held in list(self._held.items()) if not held.is_copy), None)

    @property
    def resting_bytes(self) -> int:
        """Bytes of the bundles that are nowhere else."""
        return sum(run.nbytes for run in self.index.usage())

    def lease_of(self, key: str) -> float | None:
        """The lease that a bundle was put with, in seconds."""
        return self._held[key].ttl

    def as_copy(self, stat: Stat) -> Stat:
        """The stat of a durable bundle that is here as a copy too."""
        held = self._held.get(stat.key)
        return replace(stat, tier="host") if held is not None and held.is_copy else stat
