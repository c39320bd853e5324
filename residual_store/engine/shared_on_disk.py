"""Shared leaves on disk, where several processes use and collect them."""

from __future__ import annotations

from collections.abc import Callable

from residual_store.bundle import Bundle
from residual_store.engine.durable import DurableTier
from residual_store.engine.index import Index
from residual_store.engine.key_locks import KeyLocks
from residual_store.key import run_of
from residual_store.settings import Settings

__all__ = ["SharedOnDisk"]


class SharedOnDisk:
    """The shared leaves of a durable tier: each is a bundle of one leaf with a lease, under a key that no caller has.

    There are none on an object store, which has no locks.

    ``writing`` has the locks of keys.
    """

    def __init__(
        self, durable: DurableTier, *, settings: Settings, writing: KeyLocks, clock: Callable[[], float]
    ) -> None:
        self._durable = durable
        self._settings = settings
        self._writing = writing
        self._clock = clock
        self._looked_at: set[str] = set()
        """The leaves that this process has read, or written: what a file holds may be damaged long before somebody reads it."""

    @property
    def possible(self) -> bool:
        """Whether this tier can share leaves at all."""
        return self._durable.can_share

    @property
    def index(self) -> Index:
        """The index of the tier."""
        return self._durable.index

    def keep(self, key: str, until: float, *, bundle: Bundle | None = None) -> bool:
        """Let a leaf stay until then at least; one that is missing or damaged is written if its ``bundle`` is at hand."""
        if not self.possible:
            return False
        with self._durable.sharing(), self._writing.of(key):
            if self._durable.is_whole(key, at_a_glance=key in self._looked_at):
                self._looked_at.add(key)
                return self._durable.index.extend(key, until)
            if bundle is not None:
                ttl = self._settings.dedup_seconds
                self._durable.write(key, bundle, arrived=self._clock(), ttl=ttl)
                self._looked_at.add(key)
                self._durable.index.extend(key, until)
            return bundle is not None

    def collect(self, now: float, *, prefix: str = "") -> list[str]:
        """Remove the leaves that no bundle has and whose lease has ended, and return their keys."""
        unused = self._durable.index.unused(now, prefix=prefix)
        return [key for run in sorted(set(map(run_of, unused))) for key in self._collect(run, now)]

    def _collect(self, run: str, now: float) -> list[str]:
        with self._durable.sharing(to_collect=True):
            # A process may have died between committing a bundle and noting it.
            for key in self._durable.unsettled(run):
                self._durable.refreshed(key)
            unused = self._durable.index.unused(now, prefix=f"{run}/")
            for key in unused:
                self._durable.remove(key)
                self._looked_at.discard(key)
            return unused
