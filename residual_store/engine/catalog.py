"""The catalog: which bundles there are, over both tiers, and how long they stay."""

from __future__ import annotations

import heapq
from collections.abc import Callable

from residual_store.engine.durable import DurableTier
from residual_store.engine.host import HostTier
from residual_store.engine.index import Index
from residual_store.engine.terms import check_if_exists
from residual_store.errors import AlreadyExists, NotFound
from residual_store.store import IfExists, Page, RunUsage, Stat, Tier

__all__ = ["Catalog", "already_exists"]


class Catalog:
    """The indexes of both tiers as one; a bundle whose lease has ended is not in it any more."""

    def __init__(self, host: HostTier, durable: DurableTier | None, *, clock: Callable[[], float]) -> None:
        self._host = host
        self._durable = durable
        self._clock = clock

    @property
    def _indexes(self) -> list[Index]:
        return [self._host.index] + ([self._durable.index] if self._durable is not None else [])

    def find(self, key: str) -> Stat | None:
        """The living bundle with this key."""
        stat = self._host.find(key)
        if stat is None and self._durable is not None:
            entry = self._durable.find(key)
            # What was replaced by a bundle in memory in between is found there.
            stat = self._host.find(key) if entry is None else self._host.as_copy(entry.stat)
        return None if stat is None or self._is_over(stat) else stat

    def _is_over(self, stat: Stat) -> bool:
        return stat.expires_at is not None and stat.expires_at <= self._clock()

    def stat(self, key: str) -> Stat:
        """The same; raises `NotFound` if there is none."""
        found = self.find(key)
        if found is None:
            raise NotFound(f"there is no bundle {key!r}", key=key)
        return found

    def may_refuse(self, key: str, if_exists: IfExists) -> bool:
        """Whether `existing` could refuse a put, so that it is worth asking before the bytes come in."""
        check_if_exists(if_exists)
        return if_exists != "replace" and self.find(key) is not None

    def existing(self, new: Stat, if_exists: IfExists) -> Stat | None:
        """The bundle that makes a put unnecessary, if there is one and all of it can be read; raises `AlreadyExists`."""
        found = self.same(new, if_exists)
        return found if found is not None and self._is_whole(found) else None

    def same(self, new: Stat, if_exists: IfExists) -> Stat | None:
        """The bundle that says of itself that it is the same, if there is one; raises `AlreadyExists`."""
        check_if_exists(if_exists)
        found = self.find(new.key)
        if found is None:
            return None
        if found.digest == new.digest or (if_exists == "same" and found.content == new.content):
            return found
        if if_exists == "replace":
            return None
        raise already_exists(new.key)

    def _is_whole(self, stat: Stat) -> bool:
        return stat.durability == "host" or (self._durable is not None and self._durable.is_whole(stat.key))

    def page(self, *, prefix: str, after: str, limit: int) -> Page:
        """One page of living bundles in key order."""
        now = self._clock()

        def of(tier: Index | DurableTier) -> dict[str, Stat]:
            stats = tier.page(prefix=prefix, after=after, limit=limit + 1, now=now)
            return {stat.key: stat for stat in stats}

        found = of(self._host.index)
        if self._durable is not None:
            # Three times, because a bundle may be spilled meanwhile, or replaced by one in memory.
            found = of(self._durable) | found | of(self._host.index)
        keys = heapq.nsmallest(limit + 1, found)
        entries = tuple(self._host.as_copy(found[key]) for key in keys[:limit])
        return Page(entries=entries, next=entries[-1].key if len(keys) > limit else None)

    def lease(self, key: str, ttl: float | None) -> None:
        """Let a bundle live for ``ttl`` seconds from now, or without end."""
        expires_at = None if ttl is None else self._clock() + ttl
        if not self._host.lease(key, expires_at) and self._durable is not None:
            self._durable.lease(key, ttl)

    def expired(self) -> list[tuple[Tier, str]]:
        """Tiers and keys of the bundles whose lease has ended."""
        return [(index.tier, key) for index in self._indexes for key in index.expired(self._clock())]

    def has_expired(self, tier: Tier, key: str) -> bool:
        """Whether the bundle with this key in this tier is one whose lease has ended."""
        # What is about to be removed for good is looked at in the store: another process may have replaced it.
        if tier == "host" or self._durable is None:
            stat = self._host.find(key)
        else:
            entry = self._durable.refreshed(key)
            stat = entry.stat if entry is not None else None
        return stat is not None and self._is_over(stat)

    def usage(self) -> tuple[RunUsage, ...]:
        """Bundles and bytes by run and tier."""
        return tuple(run for index in self._indexes for run in index.usage())

    @property
    def unindexed(self) -> int:
        """How many bundles on disk are still to be read before `usage` counts them right."""
        return self._durable.unindexed if self._durable is not None else 0


def already_exists(key: str) -> AlreadyExists:
    """The error for a put that would replace another bundle."""
    return AlreadyExists(
        f"another bundle is stored under {key!r}; choose another key, delete it, or pass if_exists=replace, "
        "or if_exists=same to accept equal values",
        key=key,
    )
