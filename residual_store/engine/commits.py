"""Commits: changes of what stands under a key, one at a time for each key."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from residual_store.bundle import Bundle
from residual_store.engine.catalog import Catalog, already_exists
from residual_store.engine.durable import DurableTier
from residual_store.engine.host import HostTier
from residual_store.engine.key_locks import KeyLocks
from residual_store.errors import NotFound
from residual_store.stat import stat_of
from residual_store.store import Durability, IfExists, Stat

__all__ = ["Commits"]


class Commits:
    """Puts, removes and leases bundles in the tiers, each under the lock of its key."""

    def __init__(
        self,
        *,
        catalog: Catalog,
        host: HostTier,
        durable: DurableTier | None,
        writing: KeyLocks,
        clock: Callable[[], float],
    ) -> None:
        self._catalog = catalog
        self._host = host
        self._durable = durable
        self._writing = writing
        self._clock = clock

    def put(
        self, key: str, bundle: Bundle, durability: Durability, ttl: float | None, if_exists: IfExists
    ) -> tuple[Stat, bool]:
        """What stands under the key from now on, and whether it stood there already.

        Raises `AlreadyExists`, and `LeafNotHeld` if a leaf that the bundle shares is gone.
        """
        with self._writing.of(key):
            arrived = self._clock()
            expires_at = None if ttl is None else arrived + ttl
            stat = stat_of(key, bundle.manifest, tier="host", arrived=arrived, expires_at=expires_at)
            existing = self._catalog.existing(stat, if_exists)
            if existing is None or (existing.durability == "host" and durability == "disk"):
                return self._commit(stat, bundle, durability, ttl, if_exists), existing is not None
            return existing, True

    def _commit(
        self, stat: Stat, bundle: Bundle, durability: Durability, ttl: float | None, if_exists: IfExists
    ) -> Stat:
        if durability == "host" or self._durable is None:
            self._host.put(stat, bundle)
            if self._durable is not None:
                self._durable.remove(stat.key)
            return stat
        stays = self._durable.write(stat.key, bundle, arrived=stat.arrived, ttl=ttl)
        if not stays and if_exists == "error":
            raise already_exists(stat.key)
        self._host.remove(stat.key)
        return replace(stat, tier="durable", durability="disk")

    def remove(self, key: str, digest: str | None = None) -> None:
        """Let no bundle stand under the key, or not the one that ``digest`` names; raises `NotFound` if that is not there."""
        with self._writing.of(key):
            if digest is not None and self._catalog.stat(key).digest != digest:
                raise NotFound(f"the bundle {key!r} is another one than that of the digest {digest}", key=key)
            self._host.remove(key)
            if self._durable is not None:
                self._durable.remove(key)

    def touch(self, key: str, ttl: float | None) -> None:
        """Give the bundle a lease that begins now; raises `NotFound`."""
        with self._writing.of(key):
            self._catalog.stat(key)
            self._catalog.lease(key, ttl)
