"""The durable tier: bundles and programs in tensorstore.

``bundles/<key>/@<generation>/`` is one database for each bundle, and ``programs/<fingerprint>`` one value for each program.
A generation is new for each put, so a replacement appears in one step and what a crash leaves behind is told apart.
A generation is committed once its database has a record: tensorstore makes an empty database before it commits to it.
"""

from __future__ import annotations

import logging
import shutil
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack

from residual_store.bundle import Bundle, Payload
from residual_store.engine.backlog import Backlog
from residual_store.engine.database import Database
from residual_store.engine.faults import told_apart
from residual_store.engine.generations import Generations
from residual_store.engine.host import check_held
from residual_store.engine.index import Entry, Index
from residual_store.engine.key_locks import KeyLocks
from residual_store.engine.programs import DurablePrograms
from residual_store.engine.record import Record
from residual_store.engine.root import Root
from residual_store.engine.writers import Writers
from residual_store.errors import DataLoss, NotFound, StoreFull
from residual_store.key import run_of
from residual_store.leaf import Leaf
from residual_store.manifest import Manifest
from residual_store.settings import Settings
from residual_store.stat import stat_of
from residual_store.store import Stat

__all__ = ["DurableTier"]

log = logging.getLogger("residual_store")


class DurableTier:
    """Bundles below a root; the caller keeps two writers of one key apart.

    At the start only names are read; records that the index does not know are read later, in the background or when
    somebody asks for them; ``in_background=False`` leaves it at the latter.
    """

    def __init__(
        self,
        root: Root,
        *,
        settings: Settings,
        clock: Callable[[], float] = time.time,
        in_background: bool = True,
    ) -> None:
        self.root = root
        self._settings = settings
        self._clock = clock
        self._noting = KeyLocks()
        self._damaged: set[str] = set()
        self.programs = DurablePrograms(root)
        index = root.directory / "index.sqlite" if root.directory else None
        with ExitStack() as opened, told_apart(f"opening {root.url}"):
            self._writers = Writers(root.directory)
            opened.callback(self._writers.close)
            self._generations = Generations(root, writers=self._writers, settings=settings, clock=clock)
            self.index = Index(index, tier="durable", until=lambda: clock() + settings.dedup_seconds)
            opened.callback(self.index.close)
            self._backlog = Backlog(
                self.unsettled(), settle=self._settle, retry_seconds=settings.retry_after_seconds
            )
            self._writers.forget_dead()
            self.root.empty_trash()
            opened.pop_all()
        if in_background:
            self._backlog.start()

    def close(self) -> None:
        self._backlog.close()
        self.index.close()
        self._writers.close()

    # Bundles

    def write(self, key: str, bundle: Bundle, *, arrived: float, ttl: float | None) -> bool:
        """Commit a bundle as the newest generation of its key, then remove the older ones.

        False if another process has replaced it already.
        Raises `LeafNotHeld` for a bundle whose shared leaves are not here.
        """
        if not bundle.manifest.shared:
            return self._write(key, bundle, arrived=arrived, ttl=ttl)
        if not self.can_share:
            check_held(key, bundle.manifest, lambda shared_key: False)
        with self.sharing():
            check_held(key, bundle.manifest, self._is_held)
            return self._write(key, bundle, arrived=arrived, ttl=ttl)

    def _is_held(self, shared_key: str) -> bool:
        entry = self.find(shared_key)
        return entry is not None and entry.generation not in self._damaged

    def _write(self, key: str, bundle: Bundle, *, arrived: float, ttl: float | None) -> bool:
        generation = self._generations.next(key)
        packed_below = self._settings.packed_leaf_bytes
        record = Record(manifest=bundle.manifest, arrived=arrived, ttl=ttl, packed_below=packed_below)
        try:
            self._generations.make(key, generation)
            with self._generations.database(key, generation) as database:
                database.write(bundle, record)
            expires_at = None if ttl is None else arrived + ttl
            with self._noting.of(key):
                self.index.set(self._entry(key, generation, record, expires_at=expires_at))
        except BaseException as error:
            self._generations.remove(key, generation)
            if isinstance(error, StoreFull):
                raise self._full(error, bundle.manifest.nbytes) from error
            raise
        newest = self._settle(key)
        return newest is None or newest.generation == generation

    def _full(self, error: StoreFull, needed: int) -> StoreFull:
        free = shutil.disk_usage(self.root.directory).free if self.root.directory is not None else None
        return StoreFull(f"{error.detail}; {needed} bytes are needed", needed_bytes=needed, free_bytes=free)

    def read(self, key: str, allocate: Callable[[int], Payload]) -> Bundle:
        """The whole bundle, verified, in a segment from ``allocate``; raises `NotFound` or `DataLoss`."""
        return self._read(
            key, lambda database, record: database.read(record, allocate(record.manifest.nbytes))
        )

    def read_manifest(self, key: str) -> Manifest:
        """The manifest of a bundle, from the store."""
        return self._read(key, lambda database, record: record.manifest)

    def read_leaf(
        self,
        key: str,
        index: int,
        allocate: Callable[[int], Payload],
        shared: Callable[[Leaf], Payload],
    ) -> tuple[Manifest, Payload]:
        """The manifest, and the verified bytes of one leaf, or of that which it repeats.

        The other large ones are not read; ``shared`` reads one that is not in the bundle.
        """

        def read(database: Database, record: Record) -> tuple[Manifest, Payload]:
            source = record.manifest.source(index)
            if source.is_shared:
                return record.manifest, shared(source)
            return record.manifest, database.read_leaf(record, source, allocate(source.nbytes))

        return self._read(key, read)

    def _read[T](self, key: str, read: Callable[[Database, Record], T]) -> T:
        """The result of ``read``, again if the generation was replaced meanwhile, by whatever process."""
        while (entry := self.find(key)) is not None:
            try:
                with self._generations.database(key, entry.generation) as database:
                    if (record := database.read_record()) is not None:
                        return read(database, record)
                raise DataLoss(
                    f"the bundle {key!r} is damaged on disk: its database is gone, and leaves {entry.paths} with it",
                    key=key,
                )
            except DataLoss:
                now = self.refreshed(key)
                if now is not None and now.generation == entry.generation:
                    self._damaged.add(entry.generation)
                    raise
        raise NotFound(f"there is no bundle {key!r}", key=key)

    def is_whole(self, key: str, *, at_a_glance: bool = False) -> bool:
        """Whether all of a bundle can be read, so that a repeated put would mend nothing.

        With ``at_a_glance``, only its manifest is read, and all of it if damage was found there before.
        """
        try:
            entry = self.find(key)
            if at_a_glance and entry is not None and entry.generation not in self._damaged:
                self.read_manifest(key)
            else:
                self._read(key, lambda database, record: database.check(record))
        except (NotFound, DataLoss):
            return False
        return True

    def lease(self, key: str, ttl: float | None) -> None:
        """Let a bundle live for ``ttl`` seconds from now, or without end; a longer lease than before is kept without the index too."""
        with self._noting.of(key):
            if (entry := self.index.get(key)) is None:
                return
            self.index.lease(key, None if ttl is None else self._clock() + ttl)
            with self._generations.database(key, entry.generation) as database:
                database.lengthen(ttl)

    def remove(self, key: str) -> None:
        """Remove a bundle, but not what another process is writing there; files first, so that a full disk has room for the index."""
        with self._noting.of(key):
            known = self.index.get(key)
            for generation in self._generations.of(key):
                is_committed = known is not None and known.generation == generation
                if (
                    is_committed
                    or self._generations.is_abandoned(generation)
                    or not self._generations.is_begun(key, generation)
                ):
                    self._generations.remove(key, generation)
            self.refreshed(key)

    # Shared leaves

    @property
    def can_share(self) -> bool:
        """Whether leaves can be shared: without locks between processes, one could collect what another has just used."""
        return self.root.directory is not None

    def sharing(self, *, to_collect: bool = False) -> AbstractContextManager[None]:
        """Hold off collectors of all processes, or all who use shared leaves; not to be nested."""
        return self._writers.sharing(to_collect=to_collect)

    # The index

    @property
    def unindexed(self) -> int:
        """How many keys are still to be looked at before the index alone can tell what the store holds."""
        return len(self._backlog)

    def find(self, key: str) -> Entry | None:
        """The index's entry of a bundle, made from the store if the index does not know it."""
        if key in self._backlog:
            self._backlog.settle(key)
        return self.index.get(key) or self.refreshed(key)

    def page(self, *, prefix: str, after: str, limit: int, now: float) -> list[Stat]:
        """The first ``limit`` living bundles after the key ``after`` whose key starts with ``prefix``."""
        while True:
            # In this order: what leaves the backlog meanwhile is in the index already.
            unsettled = self._backlog.first(prefix=prefix, after=after, count=limit)
            found = self.index.page(prefix=prefix, after=after, limit=limit, now=now)
            if not unsettled or (len(found) == limit and found[-1].key < unsettled[0]):
                return found
            for key in unsettled:
                self._backlog.settle(key)

    def refreshed(self, key: str) -> Entry | None:
        """The entry of a bundle after the index was brought in step with the store.

        The lock keeps other threads from what is not yet noted; other processes may commit or remove at any moment,
        so what was noted is looked at once more.
        """
        with self._noting.of(key):
            while (found := self._newest(key, known := self.index.get(key))) is not known:
                self.index.exchange(key, known, found)
            return known

    def _newest(self, key: str, known: Entry | None) -> Entry | None:
        """The entry of the newest committed generation; ``known`` itself if that is the one."""
        for generation in reversed(self._generations.of(key)):
            if known is not None and generation == known.generation:
                return known
            try:
                with self._generations.database(key, generation) as database:
                    record = database.read_record()
            except DataLoss as error:
                log.warning("not in the index: %s", error)
                continue
            if record is not None:
                # A touch that does not make the lease longer is known to the index alone, so the bundle stays longer.
                expires_at = None if record.ttl is None else self._clock() + record.ttl
                return self._entry(key, generation, record, expires_at=expires_at)
        return None

    def unsettled(self, run: str = "") -> set[str]:
        """The keys, or those of one run, of which the index does not say exactly what the names in the store say."""
        # The index first: what another process commits meanwhile is then listed but not known, and is looked at.
        known = {key: name for key, name in self.index.keys().items() if not run or run_of(key) == run}
        stored = self._generations.all(run)
        return {key for key in known.keys() | stored.keys() if stored.get(key) != [known.get(key)]}

    def _settle(self, key: str) -> Entry | None:
        """Refresh a key, and remove what is older than its newest generation or was left by a process that is gone."""
        newest = self.refreshed(key)
        for generation in self._generations.of(key):
            if newest is not None and generation == newest.generation:
                continue
            if self._generations.is_begun(key, generation):
                removable = self._generations.is_abandoned(generation)
            else:
                removable = newest is not None and generation < newest.generation
            if removable:
                self._generations.remove(key, generation)
        return newest

    def _entry(self, key: str, generation: str, record: Record, *, expires_at: float | None) -> Entry:
        manifest = record.manifest
        stat = stat_of(key, manifest, tier="durable", arrived=record.arrived, expires_at=expires_at)
        return Entry.of(stat, manifest, generation=generation, least=self._settings.dedup_bytes)
