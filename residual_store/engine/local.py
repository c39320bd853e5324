"""The local store: a host tier, and below it a durable tier if there is a root."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Self

import numpy as np
import numpy.typing as npt

from residual_store.bundle import Bundle, Payload
from residual_store.closing import ClosedAtExit
from residual_store.encoding import decode
from residual_store.engine.arrivals import Arrivals
from residual_store.engine.catalog import Catalog, already_exists
from residual_store.engine.durable import DurableTier
from residual_store.engine.host import HostTier
from residual_store.engine.key_locks import KeyLocks
from residual_store.engine.leases import Leases
from residual_store.engine.memory import HostMemory
from residual_store.engine.programs import MemoryPrograms, Programs
from residual_store.engine.root import Root
from residual_store.engine.terms import check_durability, check_limit, check_size, check_ttl, check_wait
from residual_store.errors import InvalidFrame, InvalidOption, NotFound, TooLarge
from residual_store.key import check_key, check_prefix
from residual_store.manifest import Manifest, encode
from residual_store.manifest import decode as decode_manifest
from residual_store.settings import Settings
from residual_store.stat import receipt_of, stat_of
from residual_store.store import Durability, IfExists, Page, Receipt, Stat, Tier, Usage

__all__ = ["LocalStore"]

_LOOK_AGAIN_SECONDS = 0.25


class LocalStore(ClosedAtExit):
    """The engine of this process behind the `residual_store.store.Store` protocol, which documents its methods.

    Safe to use from several threads.
    On a file system several processes may open one root; each sees what the others have committed to it.
    """

    def __init__(
        self,
        url: str,
        *,
        settings: Settings,
        durable: DurableTier | None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.url = url
        self.settings = settings
        self.arrivals = Arrivals()
        self._host = HostTier()
        self._durable = durable
        self._programs: Programs = MemoryPrograms() if durable is None else durable.programs
        self._clock = clock
        self._writing = KeyLocks()
        self._memory = HostMemory(settings, host=self._host, durable=durable, writing=self._writing)
        self._catalog = Catalog(self._host, durable, clock=clock)
        remove: dict[Tier, Callable[[str], None]] = {"host": self._host.remove}
        if durable is not None:
            remove["durable"] = durable.remove
        self._leases = Leases(
            self._catalog, settings=settings, writing=self._writing, remove=remove, clock=clock
        )

    @classmethod
    def in_memory(cls, *, settings: Settings, clock: Callable[[], float] = time.time) -> Self:
        """A store in this process's memory."""
        return cls("memory://", settings=settings, durable=None, clock=clock)

    @classmethod
    def at(cls, url: str, *, settings: Settings, clock: Callable[[], float] = time.time) -> Self:
        """A store with a durable tier at a tensorstore URL, such as ``file:///path``."""
        durable = DurableTier(Root(url), settings=settings, clock=clock)
        return cls(url, settings=settings, durable=durable, clock=clock)

    def durability(self, wanted: str | None) -> Durability:
        """The durability that a put will have; raises `InvalidOption` for one that this store cannot promise."""
        return check_durability(wanted, has_durable_tier=self.has_durable_tier)

    @property
    def has_durable_tier(self) -> bool:
        """Whether durability "disk" can be promised."""
        return self._durable is not None

    @property
    def look_again_seconds(self) -> float | None:
        """How often to look for an awaited bundle: another process may commit to the same root without a word."""
        return _LOOK_AGAIN_SECONDS if self._durable is not None else None

    def close(self) -> None:
        self._host.close()
        if self._durable is not None:
            self._durable.close()

    # Putting

    def admit(self, key: str, manifest: Manifest, *, if_exists: IfExists = "error") -> Payload:
        """Memory for the leaves of a bundle that is about to come in, if it may come in at all.

        Raises `AlreadyExists`, `TooLarge`, `StoreFull` or `Busy` before a byte of a leaf is read.
        """
        check_key(key, self.settings)
        check_size(key, manifest, self.settings)
        self._catalog.existing(stat_of(key, manifest, tier="host", arrived=0.0, expires_at=None), if_exists)
        return self._memory.allocate(manifest.nbytes)

    def put(
        self,
        key: str,
        bundle: Bundle,
        *,
        durability: Durability | None = None,
        ttl: float | None = None,
        if_exists: IfExists = "error",
    ) -> Receipt:
        started = time.perf_counter()
        self._leases.sweep()
        check_key(key, self.settings)
        check_size(key, bundle.manifest, self.settings)
        check_ttl(ttl, self.settings)
        durability = self.durability(durability)
        self._memory.check_fits(bundle.manifest.nbytes)
        if not bundle.owned:
            # What comes over a wire was checked when it came in; what is put here must be readable later too.
            decode_manifest(encode(bundle.manifest), self.settings)
            bundle.verify(InvalidFrame)
        if durability == "host" and not bundle.owned:
            bundle = bundle.copied_into(self.admit(key, bundle.manifest, if_exists=if_exists))
        with self._writing.of(key):
            arrived = self._clock()
            expires_at = None if ttl is None else arrived + ttl
            stat = stat_of(key, bundle.manifest, tier="host", arrived=arrived, expires_at=expires_at)
            existing = self._catalog.existing(stat, if_exists)
            if existing is None or (existing.durability == "host" and durability == "disk"):
                stat = self._commit(stat, bundle, durability, ttl, if_exists)
            else:
                stat = existing
        self.arrivals.announce(key)
        seconds = {"commit": time.perf_counter() - started}
        has_program = stat.fingerprint is not None and self._programs.has(stat.fingerprint)
        return receipt_of(
            stat, bundle.manifest, existed=existing is not None, has_program=has_program, seconds=seconds
        )

    def _commit(
        self, stat: Stat, bundle: Bundle, durability: Durability, ttl: float | None, if_exists: IfExists
    ) -> Stat:
        if durability == "host" or self._durable is None:
            self._host.put(stat, bundle, ttl=ttl)
            if self._durable is not None:
                self._durable.remove(stat.key)
            return stat
        stays = self._durable.write(stat.key, bundle, arrived=stat.arrived, ttl=ttl)
        if not stays and if_exists == "error":
            raise already_exists(stat.key)
        self._host.remove(stat.key)
        return replace(stat, tier="durable", durability="disk")

    # Getting

    def stat(self, key: str) -> Stat:
        found = self._catalog.find(check_key(key, self.settings))
        if found is None:
            raise NotFound(f"there is no bundle {key!r}", key=key)
        return found

    def get(self, key: str, *, wait: float = 0.0) -> Bundle:
        deadline = time.monotonic() + check_wait(wait)
        while True:
            with self.arrivals.expected(key) as arrival:
                try:
                    return self._get(key)
                except NotFound:
                    left = deadline - time.monotonic()
                    if left <= 0:
                        raise
                with contextlib.suppress(TimeoutError):
                    arrival.result(min(left, self.look_again_seconds or left))

    def _get(self, key: str) -> Bundle:
        bundle = self._host.get(key, self.stat(key).digest)
        if bundle is not None:
            return bundle
        return self._of_durable(key, lambda durable: durable.read(key, self._memory.allocate))

    def _of_durable[T](self, key: str, read: Callable[[DurableTier], T]) -> T:
        if self._durable is None:
            raise NotFound(f"there is no bundle {key!r}", key=key)
        return read(self._durable)

    def get_leaf(self, key: str, index: int) -> npt.NDArray[np.generic]:
        stat = self.stat(key)
        if not 0 <= index < stat.leaves:
            raise NotFound(
                f"the bundle {key!r} has {stat.leaves} leaves, so there is no leaf {index}", key=key
            )
        bundle = self._host.get(key, stat.digest)
        if bundle is None:
            return self._of_durable(key, lambda durable: durable.read_leaf(key, index, self._memory.allocate))
        source = bundle.manifest.source(index)
        return decode(source, bundle.payloads[source.index], as_leaf=bundle.manifest.leaves[index])

    def manifest(self, key: str) -> Manifest:
        bundle = self._host.get(key, self.stat(key).digest)
        if bundle is not None:
            return bundle.manifest
        return self._of_durable(key, lambda durable: durable.read_manifest(key))

    def prefetch(self, key: str) -> Stat:
        stat = self.stat(key)
        if stat.tier == "durable":
            bundle = self._get(key)
            with self._writing.of(key):
                if self.stat(key).digest == stat.digest:
                    self._host.put_copy(stat, bundle)
        return self.stat(key)

    # Listing, leases and deletion

    def list(self, *, prefix: str = "", after: str = "", limit: int = 100) -> Page:
        check_prefix(prefix, self.settings)
        check_prefix(after, self.settings)
        check_limit(limit, self.settings)
        return self._catalog.page(prefix=prefix, after=after, limit=limit)

    def delete(self, key: str) -> None:
        self.stat(key)
        self._remove(key)

    def delete_prefix(self, prefix: str) -> int:
        if not check_prefix(prefix, self.settings):
            raise InvalidOption(
                "the prefix is empty; name at least the run whose bundles to delete", option="prefix"
            )
        count = 0
        while page := self.list(prefix=prefix, limit=min(100, self.settings.page_entries)).entries:
            for stat in page:
                self._remove(stat.key)
            count += len(page)
        return count

    def _remove(self, key: str) -> None:
        with self._writing.of(key):
            self._host.remove(key)
            if self._durable is not None:
                self._durable.remove(key)

    def touch(self, key: str, *, ttl: float | None) -> Stat:
        check_ttl(ttl, self.settings)
        with self._writing.of(key):
            self.stat(key)
            self._catalog.lease(key, ttl)
        return self.stat(key)

    def expire(self) -> int:
        """Remove the bundles whose lease has ended, and return how many."""
        return self._leases.expire()

    def usage(self) -> Usage:
        return Usage(
            runs=self._catalog.usage(),
            host_held_bytes=self._memory.held,
            host_total_bytes=self._memory.total,
            expired=self._leases.expired,
            spilled=self._memory.spilled,
            unindexed=self._catalog.unindexed,
        )

    # Programs

    def put_program(self, fingerprint: str, program: bytes) -> None:
        if len(program) > self.settings.max_program_bytes:
            raise TooLarge(
                f"the program has {len(program)} bytes; max_program_bytes is {self.settings.max_program_bytes}"
            )
        self._programs.write(fingerprint, program)

    def get_program(self, fingerprint: str) -> bytes:
        return self._programs.read(fingerprint)
