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
    nbytes: int


@dataclass(frozen=True)
class _Copy:
    bundle: Bundle
    digest: str
    """Of the durable bundle that this is a copy of."""


class HostTier:
    """Bundles in the order of their arrival, with an index in memory, and copies of bundles in the durable tier.

    Of a key there is one or the other; a copy may be dropped at any time and does not show in listings.
    Nothing here takes longer when there are more bundles.
    """

    def __init__(self) -> None:
        self.on_removal: Callable[[Bundle], None] = lambda bundle: None
        """Called with each bundle that its key stands for no more, before that can be seen."""
        self.on_renewal: Callable[[Bundle], Bundle] = lambda bundle: bundle
        """Called with a bundle whose lease changes; gives the same bundle at another place."""
        self.index = Index(None, tier="host")
        self._held: OrderedDict[str, _Held] = OrderedDict()
        self._copies: OrderedDict[str, _Copy] = OrderedDict()
        self._resting_bytes = 0
        self._lock = threading.Lock()

    def close(self) -> None:
        self._held.clear()
        self._copies.clear()
        self.index.close()

    def put(self, stat: Stat, bundle: Bundle, *, ttl: float | None) -> None:
        """Hold a bundle that is nowhere else."""
        with self._lock:
            before = self._held.get(stat.key)
            # In one step, because who reads takes no lock and must find the one or the other.
            self._held[stat.key] = _Held(bundle, ttl, stat.nbytes)
            self._held.move_to_end(stat.key)
            self._copies.pop(stat.key, None)
            self._resting_bytes += stat.nbytes
            if before is not None:
                self._resting_bytes -= before.nbytes
                self.on_removal(before.bundle)
            self.index.set(Entry(stat=stat))

    def put_copy(self, stat: Stat, bundle: Bundle) -> None:
        """Hold a copy of a durable bundle."""
        with self._lock:
            if stat.key not in self._held:
                self._copies[stat.key] = _Copy(bundle, stat.digest)

    def get(self, key: str, digest: str) -> Bundle | None:
        """The bundle with this key, or a copy of the durable one with this ``digest``, if it is here."""
        if (held := self._held.get(key)) is not None:
            return held.bundle
        copy = self._copies.get(key)
        return copy.bundle if copy is not None and copy.digest == digest else None

    def remove(self, key: str) -> None:
        """Let go of a bundle or copy; its memory is free when its last view dies."""
        with self._lock:
            self._let_go(key)
            self.index.remove(key)

    def renew(self, key: str) -> None:
        """Let no client take its copy of a bundle's lease for the one that the bundle has from now on."""
        with self._lock:
            if (held := self._held.get(key)) is not None:
                self._held[key] = replace(held, bundle=self.on_renewal(held.bundle))

    def _let_go(self, key: str) -> None:
        self._copies.pop(key, None)
        if (held := self._held.pop(key, None)) is not None:
            self._resting_bytes -= held.nbytes
            self.on_removal(held.bundle)

    def drop_copy(self) -> bool:
        """Let go of the oldest copy; false if there is none."""
        with self._lock:
            if self._copies:
                self._copies.popitem(last=False)
                return True
            return False

    def oldest(self) -> str | None:
        """The key that arrived first of those that are nowhere else: the backward pass wants it last."""
        with self._lock:
            return next(iter(self._held), None)

    @property
    def resting_bytes(self) -> int:
        """Bytes of the bundles that are nowhere else."""
        return self._resting_bytes

    def lease_of(self, key: str) -> float | None:
        """The lease that a bundle was put with, in seconds."""
        return self._held[key].ttl

    def as_copy(self, stat: Stat) -> Stat:
        """The stat of a durable bundle that is here as a copy too."""
        copy = self._copies.get(stat.key)
        return replace(stat, tier="host") if copy is not None and copy.digest == stat.digest else stat
