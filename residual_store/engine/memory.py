"""Host memory: segments within the budget, and making room when it is used up."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

from residual_store.arena import Arena
from residual_store.bundle import Bundle
from residual_store.engine.durable import DurableTier
from residual_store.engine.host import HostTier
from residual_store.engine.key_locks import KeyLocks
from residual_store.engine.shared_on_disk import SharedOnDisk
from residual_store.errors import Busy, ResidualStoreError, StoreFull
from residual_store.key import run_of
from residual_store.place import BlockName
from residual_store.pool_usage import PoolUsage
from residual_store.segment import Segment
from residual_store.segments import NoRoom, SegmentPool
from residual_store.settings import Settings
from residual_store.shared_leaf import shared_keys
from residual_store.store import Stat

__all__ = ["HostMemory"]


class HostMemory:
    """Segments for bundles and for bodies in flight, out of one budget.

    When it is used up, copies of durable bundles go first, then the oldest bundles are spilled to the durable tier:
    the backward pass wants the newest first.
    """

    def __init__(
        self,
        settings: Settings,
        *,
        arena: Arena | None,
        host: HostTier,
        durable: DurableTier | None,
        shared_on_disk: SharedOnDisk | None,
        writing: KeyLocks,
        clock: Callable[[], float],
    ) -> None:
        self._settings = settings
        self._pool = SegmentPool(
            total=settings.host_budget,
            arena=arena,
            smallest=settings.pooled_bytes,
            idle_seconds=settings.segment_idle_seconds,
        )
        self._host = host
        host.on_removal = self.forget
        host.on_renewal = self.moved
        self._durable = durable
        self._shared_on_disk = shared_on_disk
        self._writing = writing
        self._clock = clock
        self.spilled = 0

    def close(self) -> None:
        self._pool.close()

    @property
    def usage(self) -> PoolUsage:
        """Bytes in use, by bundles and by bodies in flight, and bytes that wait to be used again."""
        return self._pool.usage

    @property
    def total(self) -> int:
        """The budget in bytes."""
        return self._pool.total

    def check_fits(self, nbytes: int) -> None:
        """Raise `StoreFull` for a bundle that could never be read back into memory."""
        if nbytes > self.total:
            raise self._refusal(nbytes)

    def allocate(self, nbytes: int, *, run: str) -> Segment:
        """A segment for a bundle of ``run``; raises `StoreFull`, or `Busy` if it would fit without the bodies in flight."""
        while True:
            try:
                return self._pool.allocate(nbytes, run=run)
            except NoRoom:
                if not self._make_room(nbytes):
                    raise self._refusal(nbytes) from None

    def recycle(self, nbytes: int, *, run: str) -> Segment | None:
        """A segment that the ``run`` has used before, as `SegmentPool.recycle` gives it."""
        return self._pool.recycle(nbytes, run=run)

    def forget(self, bundle: Bundle) -> None:
        """Let no client find a bundle that is no more what its key stands for."""
        self._pool.void(bundle.place)

    def moved(self, bundle: Bundle) -> Bundle:
        """The same bundle in the same memory, which clients find at another place from now on."""
        return replace(bundle, place=self._pool.renewed(bundle.place))

    def settle(self) -> None:
        """Offer what has come back to clients on this host."""
        self._pool.settle()

    def adopt(self, block: BlockName, nbytes: int, *, run: str) -> Segment | None:
        """The segment that a client has taken and filled, as `SegmentPool.adopt` gives it."""
        return self._pool.adopt(block, nbytes, run=run)

    def _make_room(self, nbytes: int) -> bool:
        """Drop a copy or spill a bundle; false if that is impossible or would not help."""
        if nbytes > self.total:
            return False
        if self._host.drop_copy() or self._host.collect(self._clock()):
            return True
        key = self._host.oldest()
        if key is None or self._durable is None:
            # Leaves that a client was told of; it sends them again.
            return bool(self._host.collect(math.inf))
        with self._writing.of(key):
            stat = self._host.find(key)
            bundle = self._host.get(key, stat.digest) if stat is not None else None
            if bundle is not None and stat is not None:
                newer = self._durable.find(key)
                # Another process may have committed the key since; its bundle stays.
                if newer is None or newer.stat.arrived < stat.arrived:
                    spilled = self._spillable(key, bundle)
                    self._durable.write(key, spilled, arrived=stat.arrived, ttl=self._lease_of(stat))
                    self._durable.index.lease(key, stat.expires_at)
                    self.spilled += 1
                self._host.remove(key)
        return True

    def _lease_of(self, stat: Stat) -> float | None:
        """What is put on disk as the lease: it ends with that of the bundle, or later, whichever way the clock was turned."""
        if stat.expires_at is None:
            return None
        return stat.expires_at - min(stat.arrived, self._clock())

    def _spillable(self, key: str, bundle: Bundle) -> Bundle:
        """The bundle as the durable tier can have it: the leaves that it shares are there, or are its own again."""
        if not bundle.manifest.shared:
            return bundle
        keys = shared_keys(run_of(key), bundle.manifest)
        leaves = [leaf for one in keys if (leaf := self._host.shared(one)) is not None]
        if self._shared_on_disk is None or not self._shared_on_disk.possible:
            return bundle.resolved(leaves)
        until = self._clock() + self._settings.dedup_seconds
        for one, leaf in zip(keys, leaves, strict=True):
            self._shared_on_disk.keep(one, until, bundle=leaf)
        return bundle

    def _refusal(self, nbytes: int) -> ResidualStoreError:
        free = self.total - (self._host.resting_bytes if self._durable is None else 0)
        if nbytes > free:
            return StoreFull(
                f"{nbytes} bytes do not fit: bundles leave {free} of {self.total} bytes of host memory free; "
                + (
                    "delete some, raise host_bytes, or give the store a root to spill to"
                    if self._durable is None
                    else "raise host_bytes"
                ),
                needed_bytes=nbytes,
                free_bytes=free,
            )
        return Busy(
            f"{nbytes} bytes do not fit beside the bodies in flight and what readers hold; try again",
            needed_bytes=nbytes,
            retry_after=self._settings.retry_after_seconds,
        )
