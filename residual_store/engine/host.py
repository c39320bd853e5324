"""The host tier: bundles in this process's memory."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, replace

from residual_store.bundle import Bundle
from residual_store.engine.index import Entry, Index
from residual_store.store import Stat

__all__ = ["HostTier"]


@dataclass(frozen=True)
class _Held:
    bundle: Bundle
    ttl: float | None
    copy_of: str | None = None
    """The digest of the durable bundle that this is a copy of, if it is one."""


class HostTier:
    """A dictionary of bundles in the order of their arrival, with an index in memory.

    A bundle is the only one of its key, or a copy of one in the durable tier, which may be dropped at any time.
    """

    def __init__(self) -> None:
        self.on_removal: Callable[[Bundle], None] = lambda bundle: None
        """Called with each bundle that its key stands for no more, before that can be seen."""
        self.index = Index(None, tier="host")
        self._held: OrderedDict[str, _Held] = OrderedDict()
        self._lock = threading.Lock()

    def close(self) -> None:
        self._held.clear()
        self.index.close()

    def put(self, stat: Stat, bundle: Bundle, *, ttl: float | None) -> None:
        """Hold a bundle that is nowhere else."""
        with self._lock:
            self._let_go(stat.key)
            self._held[stat.key] = _Held(bundle, ttl)
            self._held.move_to_end(stat.key)
            self.index.set(Entry(stat=stat))

    def put_copy(self, stat: Stat, bundle: Bundle) -> None:
        """Hold a copy of a durable bundle; it does not show in listings."""
        with self._lock:
            if stat.key not in self._held or self._held[stat.key].copy_of is not None:
                self._held[stat.key] = _Held(bundle, None, copy_of=stat.digest)

    def get(self, key: str, digest: str) -> Bundle | None:
        """The bundle with this key, or a copy of the durable one with this ``digest``, if it is here."""
        held = self._held.get(key)
        return None if held is None or held.copy_of not in (None, digest) else held.bundle

    def remove(self, key: str) -> None:
        """Let go of a bundle or copy; its memory is free when its last view dies."""
        with self._lock:
            self._let_go(key)
            self.index.remove(key)

    def renew(self, key: str) -> None:
        """Let no client take its copy of a bundle's lease for the one that the bundle has from now on."""
        held = self._held.get(key)
        if held is not None:
            self.on_removal(held.bundle)

    def _let_go(self, key: str) -> None:
        held = self._held.pop(key, None)
        if held is not None:
            self.on_removal(held.bundle)

    def drop_copy(self) -> bool:
        """Let go of the oldest copy; false if there is none."""
        with self._lock:
            key = next((key for key, held in self._held.items() if held.copy_of is not None), None)
            if key is not None:
                del self._held[key]
            return key is not None

    def oldest(self) -> str | None:
        """The key that arrived first of those that are nowhere else: the backward pass wants it last."""
        return next((key for key, held in list(self._held.items()) if held.copy_of is None), None)

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
        return replace(stat, tier="host") if held is not None and held.copy_of == stat.digest else stat
