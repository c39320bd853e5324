"""Leases: how long bundles live, and removing those whose time is over."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping

from residual_store.engine.catalog import Catalog
from residual_store.engine.key_locks import KeyLocks
from residual_store.errors import ResidualStoreError
from residual_store.settings import Settings
from residual_store.store import Tier

__all__ = ["Leases"]

log = logging.getLogger("residual_store")


class Leases:
    """Ends leases: a bundle is invisible from the moment its lease ends, and its bytes go at the next sweep."""

    def __init__(
        self,
        catalog: Catalog,
        *,
        settings: Settings,
        writing: KeyLocks,
        remove: Mapping[Tier, Callable[[str], None]],
        collect: Callable[[], None],
        clock: Callable[[], float],
    ) -> None:
        self._catalog = catalog
        self._settings = settings
        self._writing = writing
        self._remove = remove
        self._collect = collect
        self._clock = clock
        self._sweep_at = clock() + settings.sweep_seconds
        self.expired = 0

    def sweep(self) -> None:
        """Remove expired bundles now and then, if nobody else does."""
        if self._clock() >= self._sweep_at:
            try:
                self.expire()
            except ResidualStoreError as error:
                # No reason to refuse a put.
                log.warning("bundles whose lease has ended are removed later: %s", error, exc_info=error)
            self._sweep_at = self._clock() + self._settings.sweep_seconds

    def expire(self) -> int:
        """Remove the bundles whose lease has ended, and return how many; then what only they had goes in its time."""
        # Who sweeps in a thread of its own, as a server does, does it again before a put has to.
        self._sweep_at = self._clock() + 2 * self._settings.sweep_seconds
        count = sum([self._has_removed(tier, key) for tier, key in self._catalog.expired()])
        self._collect()
        self.expired += count
        return count

    def _has_removed(self, tier: Tier, key: str) -> bool:
        try:
            with self._writing.of(key):
                if is_over := self._catalog.has_expired(tier, key):
                    self._remove[tier](key)
                return is_over
        except ResidualStoreError as error:
            # No reason to keep the others, and it is invisible all the same.
            log.warning("%r, whose lease has ended, is removed later: %s", key, error, exc_info=error)
            return False
