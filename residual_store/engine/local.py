"""The local store: a host tier, and below it a durable tier if there is a root."""

from __future__ import annotations

import contextlib
import heapq
import time
from collections.abc import Callable
from types import TracebackType
from typing import Self

import numpy as np
import numpy.typing as npt

from residual_store.bundle import Bundle, Payload
from residual_store.encoding import decode
from residual_store.engine.arrivals import Arrivals
from residual_store.engine.durable import DurableTier
from residual_store.engine.host import HostTier
from residual_store.engine.index import Index
from residual_store.engine.key_locks import KeyLocks
from residual_store.engine.memory import HostMemory
from residual_store.engine.programs import MemoryPrograms, Programs
from residual_store.engine.root import Root
from residual_store.errors import AlreadyExists, DataLoss, InvalidOption, NotFound, TooLarge
from residual_store.key import check_key, check_prefix
from residual_store.manifest import Manifest
from residual_store.settings import Settings
from residual_store.stat import receipt_of, stat_of
from residual_store.store import Durability, IfExists, Page, Receipt, Stat, Usage

__all__ = ["LocalStore"]

_LOOK_AGAIN_SECONDS = 0.25


class LocalStore:
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
        self._expired = 0

    @classmethod
    def in_memory(cls, *, settings: Settings, clock: Callable[[], float] = time.time) -> Self:
        """A store in this process's memory."""
        return cls("memory://", settings=settings, durable=None, clock=clock)

    @classmethod
    def at(cls, url: str, *, settings: Settings, clock: Callable[[], float] = time.time) -> Self:
        """A store with a durable tier at a tensorstore URL, such as ``file:///path``."""
        return cls(
            url,
            settings=settings,
            durable=DurableTier(Root(url), settings=settings, clock=clock),
            clock=clock,
        )

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

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # Putting

    def admit(self, key: str, manifest: Manifest, *, if_exists: IfExists = "error") -> Payload:
        """Memory for the leaves of a bundle that is about to come in, if it may come in at all.

        Raises `AlreadyExists`, `TooLarge`, `StoreFull` or `Busy` before a byte of a leaf is read.
        """
        self._check_put(key, manifest)
        self._existing(key, stat_of(key, manifest, tier="host", arrived=0.0, expires_at=None), if_exists)
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
        self._check_put(key, bundle.manifest)
        self._check_ttl(ttl)
        durability = self.check_durability(durability)
        if durability == "host" and not bundle.owned:
            bundle = bundle.copied_into(self.admit(key, bundle.manifest, if_exists=if_exists))
        with self._writing.of(key):
            arrived = self._clock()
            expires_at = None if ttl is None else arrived + ttl
            stat = stat_of(key, bundle.manifest, tier="host", arrived=arrived, expires_at=expires_at)
            existing = self._existing(key, stat, if_exists)
            if existing is None or (existing.durability == "host" and durability == "disk"):
                stat = self._commit(stat, bundle, durability, ttl)
            else:
                stat = existing
        self.arrivals.announce(key)
        seconds = {"commit": time.perf_counter() - started}
        return receipt_of(stat, bundle.manifest, existed=existing is not None, seconds=seconds)

    def _commit(self, stat: Stat, bundle: Bundle, durability: Durability, ttl: float | None) -> Stat:
        if durability == "host" or self._durable is None:
            self._host.put(stat, bundle, ttl=ttl)
            if self._durable is not None:
                self._durable.remove(stat.key)
            return stat
        stat = self._durable.write(stat.key, bundle, arrived=stat.arrived, ttl=ttl).stat
        self._host.remove(stat.key)
        return stat

    def check_durability(self, wanted: str | None) -> Durability:
        """The durability that a put will have; raises `InvalidOption` for one that this store cannot promise."""
        if wanted == "disk" and self._durable is None:
            raise InvalidOption(
                f"{self.url} keeps bundles in memory only, so durability=disk cannot be promised; "
                "ask for durability=host, or give the store a root",
                option="durability",
            )
        match wanted:
            case None:
                return "host" if self._durable is None else "disk"
            case "host" | "disk":
                return wanted
        raise InvalidOption(f"durability is {wanted!r}; it must be host or disk", option="durability")

    def _check_put(self, key: str, manifest: Manifest) -> None:
        check_key(key, self.settings)
        if manifest.nbytes > self.settings.max_bundle_bytes:
            raise TooLarge(
                f"{key!r} has {manifest.nbytes} bytes; max_bundle_bytes is {self.settings.max_bundle_bytes}"
            )

    def _check_ttl(self, ttl: float | None) -> None:
        if ttl is not None and not 0 < ttl <= self.settings.max_ttl_seconds:
            raise InvalidOption(
                f"ttl is {ttl}; a lease has more than 0 and at most {self.settings.max_ttl_seconds:.0f} seconds",
                option="ttl",
            )

    def _existing(self, key: str, new: Stat, if_exists: IfExists) -> Stat | None:
        """The bundle that makes this put unnecessary, if there is one; raises `AlreadyExists`."""
        if if_exists not in ("error", "same", "replace"):
            raise InvalidOption(
                f"if_exists is {if_exists!r}; it must be error, same or replace", option="if_exists"
            )
        found = self._find(key)
        if found is None or found.digest == new.digest:
            return found
        if if_exists == "same" and found.content == new.content:
            return found
        if if_exists == "replace":
            return None
        raise AlreadyExists(
            f"another bundle is stored under {key!r}; choose another key, delete it, or pass if_exists=replace",
            key=key,
        )

    # Getting

    def _find(self, key: str) -> Stat | None:
        entry = self._host.index.get(key)
        if entry is None and self._durable is not None:
            entry = self._durable.find(key)
        if entry is None or (entry.stat.expires_at is not None and entry.stat.expires_at <= self._clock()):
            return None
        return self._host.as_copy(entry.stat)

    def stat(self, key: str) -> Stat:
        found = self._find(check_key(key, self.settings))
        if found is None:
            raise NotFound(f"there is no bundle {key!r}", key=key)
        return found

    def get(self, key: str, *, wait: float = 0.0) -> Bundle:
        deadline = time.monotonic() + min(wait, self.settings.max_wait_seconds)
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
        self.stat(key)
        bundle = self._host.get(key)
        if bundle is not None:
            return bundle
        return self._of_durable(key, lambda durable: durable.read(key, self._memory.allocate))

    def _of_durable[T](self, key: str, read: Callable[[DurableTier], T]) -> T:
        if self._durable is None:
            raise NotFound(f"there is no bundle {key!r}", key=key)
        try:
            return read(self._durable)
        except DataLoss:
            # A writer may have removed the generation that was being read; with none at work the answer is final.
            with self._writing.of(key):
                return read(self._durable)

    def get_leaf(self, key: str, index: int) -> npt.NDArray[np.generic]:
        leaves = self.stat(key).leaves
        if not 0 <= index < leaves:
            raise NotFound(f"the bundle {key!r} has {leaves} leaves, so there is no leaf {index}", key=key)
        bundle = self._host.get(key)
        if bundle is None:
            return self._of_durable(key, lambda durable: durable.read_leaf(key, index, self._memory.allocate))
        source = bundle.manifest.source(index)
        return decode(source, bundle.payloads[source.index], as_leaf=bundle.manifest.leaves[index])

    def manifest(self, key: str) -> Manifest:
        self.stat(key)
        bundle = self._host.get(key)
        if bundle is not None:
            return bundle.manifest
        return self._of_durable(key, lambda durable: durable.read_manifest(key))

    def prefetch(self, key: str) -> Stat:
        stat = self.stat(key)
        if stat.tier == "durable":
            bundle = self._get(key)
            with self._writing.of(key):
                if self.stat(key).digest == stat.digest:
                    self._host.put_copy(key, bundle)
        return self.stat(key)

    # Listing, leases and deletion

    def _indexes(self) -> list[Index]:
        return [self._host.index] + ([self._durable.index] if self._durable is not None else [])

    def list(self, *, prefix: str = "", after: str = "", limit: int = 100) -> Page:
        check_prefix(prefix, self.settings)
        if not 1 <= limit <= self.settings.page_entries:
            raise InvalidOption(
                f"limit is {limit}; a page has 1 to {self.settings.page_entries} entries", option="limit"
            )
        now = self._clock()
        found: dict[str, Stat] = {}
        for index in reversed(self._indexes()):
            found |= {
                stat.key: stat for stat in index.page(prefix=prefix, after=after, limit=limit + 1, now=now)
            }
        keys = heapq.nsmallest(limit + 1, found)
        entries = tuple(self._host.as_copy(found[key]) for key in keys[:limit])
        return Page(entries=entries, next=entries[-1].key if len(keys) > limit else None)

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
        self._check_ttl(ttl)
        with self._writing.of(key):
            self.stat(key)
            expires_at = None if ttl is None else self._clock() + ttl
            for index in self._indexes():
                index.lease(key, expires_at)
        return self.stat(key)

    def expire(self) -> int:
        """Remove the bundles whose lease has ended, and return how many."""
        count = 0
        for index in self._indexes():
            for key in index.expired(self._clock()):
                with self._writing.of(key):
                    if self._find(key) is None:
                        self._remove(key)
                        count += 1
        self._expired += count
        return count

    def usage(self) -> Usage:
        return Usage(
            runs=tuple(run for index in self._indexes() for run in index.usage()),
            host_held_bytes=self._memory.held,
            host_total_bytes=self._memory.total,
            expired=self._expired,
            spilled=self._memory.spilled,
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
