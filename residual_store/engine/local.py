"""The local store: a host tier, and below it a durable tier if there is a root."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from typing import Self

import numpy as np
import numpy.typing as npt

from residual_store.arena import Arena
from residual_store.bundle import Bundle, Payload
from residual_store.closing import ClosedAtExit
from residual_store.copier import Copier
from residual_store.engine.admission import Admission
from residual_store.engine.arrivals import Arrivals
from residual_store.engine.catalog import Catalog
from residual_store.engine.commits import Commits
from residual_store.engine.durable import DurableTier
from residual_store.engine.host import HostTier
from residual_store.engine.key_locks import KeyLocks
from residual_store.engine.leases import Leases
from residual_store.engine.memory import HostMemory
from residual_store.engine.parts import Parts
from residual_store.engine.programs import MemoryPrograms, Programs
from residual_store.engine.reading import Reading
from residual_store.engine.root import Root
from residual_store.engine.shared_on_disk import SharedOnDisk
from residual_store.engine.sharing import Sharing
from residual_store.engine.terms import check_durability, check_limit, check_size, check_ttl, check_wait
from residual_store.errors import NotFound, TooLarge
from residual_store.key import check_deleted, check_key, check_prefix, check_run
from residual_store.manifest import Manifest
from residual_store.parts import Part
from residual_store.settings import Settings
from residual_store.shared_leaf import SharedLeaf
from residual_store.stat import receipt_of
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
        arena: Arena | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.url = url
        self.settings = settings
        self.arrivals = Arrivals()
        self._host = HostTier(settings, clock=clock)
        self._durable = durable
        self._programs: Programs = (
            MemoryPrograms(budget=settings.host_budget // 4, named=self._host.fingerprints)
            if durable is None
            else durable.programs
        )
        self._clock = clock
        self._copier = Copier()
        self._writing = KeyLocks()
        on_disk = None
        if durable is not None:
            on_disk = SharedOnDisk(durable, settings=settings, writing=self._writing, clock=clock)
        self._memory = HostMemory(
            settings,
            arena=arena,
            host=self._host,
            durable=durable,
            shared_on_disk=on_disk,
            writing=self._writing,
            clock=clock,
        )
        self._catalog = Catalog(self._host, durable, clock=clock)
        self._reading = Reading(catalog=self._catalog, host=self._host, durable=durable, memory=self._memory)
        self._sharing = Sharing(
            host=self._host,
            on_disk=on_disk,
            memory=self._memory,
            reading=self._reading,
            copier=self._copier,
            settings=settings,
            clock=clock,
        )
        self.admission = Admission(
            settings,
            catalog=self._catalog,
            memory=self._memory,
            sharing=self._sharing,
            copier=self._copier,
        )
        remove: dict[Tier, Callable[[str], None]] = {"host": self._host.remove}
        remove |= {"durable": durable.remove} if durable is not None else {}
        self._commits = Commits(
            catalog=self._catalog, host=self._host, durable=durable, writing=self._writing, clock=clock
        )
        self._leases = Leases(
            self._catalog,
            settings=settings,
            writing=self._writing,
            remove=remove,
            collect=self._sharing.collect,
            clock=clock,
        )
        self._parts = Parts(self, memory=self._memory, programs=self._programs, durable=durable, clock=clock)

    @classmethod
    def in_memory(
        cls, *, settings: Settings, arena: Arena | None = None, clock: Callable[[], float] = time.time
    ) -> Self:
        """A store in this process's memory, or in that of an ``arena``."""
        return cls("memory://", settings=settings, durable=None, arena=arena, clock=clock)

    @classmethod
    def at(
        cls,
        url: str,
        *,
        settings: Settings,
        arena: Arena | None = None,
        clock: Callable[[], float] = time.time,
    ) -> Self:
        """A store with a durable tier at a tensorstore URL, such as ``file:///path``."""
        durable = DurableTier(Root(url), settings=settings, clock=clock)
        return cls(url, settings=settings, durable=durable, arena=arena, clock=clock)

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
        self._parts.close()
        self._copier.close()
        self._host.close()
        self._memory.close()
        if self._durable is not None:
            self._durable.close()

    # Putting

    def put(
        self,
        key: str,
        bundle: Bundle,
        *,
        durability: Durability | None = None,
        ttl: float | None = None,
        if_exists: IfExists = "error",
        part: Part | None = None,
        moved: Callable[[int], object] | None = None,
    ) -> Receipt:
        started = time.perf_counter()
        self._leases.sweep()
        check_key(key, self.settings)
        check_size(key, bundle.manifest, self.settings)
        check_ttl(ttl, self.settings)
        durability = self.durability(durability)
        if part is not None:
            return self._parts.put(key, bundle, part, durability=durability, ttl=ttl, if_exists=if_exists)
        self._memory.check_fits(bundle.manifest.nbytes)
        if not bundle.owned:
            bundle = self.admission.take_in(key, bundle, durability, if_exists)
        stat, existed = self._commits.put(key, bundle, durability, ttl, if_exists)
        self.arrivals.announce(key)
        seconds = {"commit": time.perf_counter() - started}
        has_program = self._programs.has(bundle.manifest)
        return receipt_of(stat, bundle.manifest, existed=existed, has_program=has_program, seconds=seconds)

    def lend(self, key: str, nbytes: int) -> Payload | None:
        """None: a put copies within this process, and checks what it copies."""

    def held(
        self, run: str, leaves: Sequence[SharedLeaf], *, durability: Durability | None = None
    ) -> tuple[bool, ...]:
        check_run(run, self.settings)
        return self._sharing.held(run, leaves, self.durability(durability))

    # Getting

    def stat(self, key: str) -> Stat:
        return self._reading.stat(check_key(key, self.settings))

    def get(self, key: str, *, wait: float = 0.0, verify: bool = False) -> Bundle:
        deadline = time.monotonic() + check_wait(wait)
        while True:
            with self.arrivals.expected(key) as arrival:
                try:
                    return self._reading.bundle(check_key(key, self.settings), verify=verify)
                except NotFound:
                    left = deadline - time.monotonic()
                    if left <= 0:
                        raise
                with contextlib.suppress(TimeoutError):
                    arrival.result(min(left, self.look_again_seconds or left))

    def get_leaf(self, key: str, index: int) -> npt.NDArray[np.generic]:
        return self._reading.leaf(check_key(key, self.settings), index)

    def manifest(self, key: str) -> Manifest:
        return self._reading.manifest(check_key(key, self.settings))

    def prefetch(self, key: str) -> Stat:
        stat = self.stat(key)
        if stat.tier == "durable":
            bundle = self._reading.bundle(key)
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

    def delete(self, key: str, *, digest: str | None = None) -> None:
        self.stat(key)
        self._remove(key, digest)

    def delete_prefix(self, prefix: str) -> int:
        check_deleted(prefix, self.settings)
        count, after, limit = 0, "", min(100, self.settings.page_entries)
        while page := self.list(prefix=prefix, after=after, limit=limit).entries:
            for stat in page:
                self._remove(stat.key)
            # Not from the start again: what is put there meanwhile stays, and this ends.
            count, after = count + len(page), page[-1].key
        self._sharing.drop(prefix)
        self._parts.forget_below(prefix)
        return count

    def _remove(self, key: str, digest: str | None = None) -> None:
        self._commits.remove(key, digest)
        self._memory.settle()

    def touch(self, key: str, *, ttl: float | None) -> Stat:
        check_ttl(ttl, self.settings)
        self._commits.touch(check_key(key, self.settings), ttl)
        return self.stat(key)

    def expire(self) -> int:
        """Remove the bundles whose lease has ended, and return how many."""
        return self._leases.expire() + self._parts.expire()

    def usage(self) -> Usage:
        memory, runs = self._memory.usage, self._catalog.usage()
        return Usage(
            runs=runs,
            host_held_bytes=memory.held,
            host_idle_bytes=memory.idle,
            segments_fresh=memory.fresh,
            segments_recycled=memory.recycled,
            host_total_bytes=self._memory.total,
            host_program_bytes=self._programs.held_bytes,
            expired=self._leases.expired + self._parts.expired,
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
