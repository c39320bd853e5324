"""The durable tier: bundles and programs in tensorstore.

``bundles/<key>/@<generation>/`` is one database for each bundle, and ``programs/<fingerprint>`` one value for each program.
A generation is new for each put, so a replacement appears in one step and what a crash leaves behind is told apart.
A generation is committed once its database has a record: tensorstore makes an empty database before it commits to it.
"""

from __future__ import annotations

import logging
import re
import shutil
import time
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from residual_store.bundle import Bundle, Payload
from residual_store.encoding import decode
from residual_store.engine.database import Database, Record
from residual_store.engine.index import Entry, Index
from residual_store.engine.programs import DurablePrograms
from residual_store.engine.root import Root
from residual_store.engine.writers import Writers
from residual_store.errors import DataLoss, InvalidKey, NotFound, StoreFull
from residual_store.key import check_key
from residual_store.manifest import Manifest
from residual_store.settings import Settings
from residual_store.stat import stat_of

__all__ = ["DurableTier"]

log = logging.getLogger("residual_store")

_BUNDLES = "bundles/"
_MARK = "@"
_GENERATION = re.compile(r"[0-9a-f]{1,16}-[0-9a-f]{12}")


class DurableTier:
    """Bundles below a root; the caller keeps two writers of one key apart."""

    def __init__(self, root: Root, *, settings: Settings, clock: Callable[[], float] = time.time) -> None:
        self._root = root
        self._writers = Writers(root.directory)
        self._settings = settings
        self._clock = clock
        self.programs = DurablePrograms(root)
        self.index = Index(root.directory / "index.sqlite" if root.directory else None, tier="durable")
        self.reconcile()

    def close(self) -> None:
        self.index.close()
        self._writers.close()

    # Bundles

    def write(self, key: str, bundle: Bundle, *, arrived: float, ttl: float | None) -> bool:
        """Commit a bundle as the newest generation of its key, then remove the older ones.

        False if another process has replaced it already.
        """
        generation = self._next_generation(self._generations(key))
        packed_below = self._settings.packed_leaf_bytes
        record = Record(manifest=bundle.manifest, arrived=arrived, ttl=ttl, packed_below=packed_below)
        try:
            self._root.make_folder(_folder(key, generation))
            self._database(key, generation).write(bundle, record)
            self._note(key, generation, record, expires_at=None if ttl is None else arrived + ttl)
        except BaseException as error:
            self._root.remove_folder(_folder(key, generation))
            if isinstance(error, StoreFull):
                raise self._full(error, bundle.manifest.nbytes) from error
            raise
        return self._remove_others(key, generation) == generation

    def _remove_others(self, key: str, own: str) -> str:
        """Remove the generations that a new one supersedes, and return the one that stays.

        That is another one if another process has committed a newer one meanwhile.
        """
        generations = self._generations(key)
        newest = own
        if generations[-1:] != [own]:
            entry = self._adopt(key, generations)
            newest = entry.generation if entry is not None else own
        self._remove_superseded(key, generations, newest)
        return newest

    def _full(self, error: StoreFull, needed: int) -> StoreFull:
        free = shutil.disk_usage(self._root.directory).free if self._root.directory is not None else None
        return StoreFull(f"{error.detail}; {needed} bytes are needed", needed_bytes=needed, free_bytes=free)

    def read(self, key: str, allocate: Callable[[int], Payload]) -> Bundle:
        """The whole bundle, verified, in a segment from ``allocate``; raises `NotFound` or `DataLoss`."""
        return self._read(
            key, lambda database, record: database.read(record, allocate(record.manifest.nbytes))
        )

    def read_manifest(self, key: str) -> Manifest:
        """The manifest of a bundle, from the store."""
        return self._read(key, lambda database, record: record.manifest)

    def read_leaf(self, key: str, index: int, allocate: Callable[[int], Payload]) -> npt.NDArray[np.generic]:
        """One leaf, verified, without reading the other large ones."""

        def read(database: Database, record: Record) -> npt.NDArray[np.generic]:
            source = record.manifest.source(index)
            payload = database.read_leaf(record, source, allocate(source.nbytes))
            return decode(source, payload, as_leaf=record.manifest.leaves[index])

        return self._read(key, read)

    def _read[T](self, key: str, read: Callable[[Database, Record], T]) -> T:
        """The result of ``read``, again if the generation was replaced meanwhile, by whatever process."""
        while (entry := self.find(key)) is not None:
            database = self._database(key, entry.generation)
            try:
                record = database.read_record()
                if record is not None:
                    return read(database, record)
                raise DataLoss(
                    f"the bundle {key!r} is damaged on disk: its database is gone, and leaves {entry.paths} with it",
                    key=key,
                )
            except DataLoss:
                if entry.generation in self._generations(key) and self._is_current(entry):
                    raise
                self._follow(entry)
        raise NotFound(f"there is no bundle {key!r}", key=key)

    def _is_current(self, entry: Entry) -> bool:
        now = self.index.get(entry.stat.key)
        return now is not None and now.generation == entry.generation

    def _follow(self, entry: Entry) -> None:
        """Let the index know what has come in the place of a generation that is gone."""
        key = entry.stat.key
        if self._is_current(entry) and self._adopt(key, self._generations(key)) is None:
            self.index.remove(key)

    def find(self, key: str) -> Entry | None:
        """The index's entry of a bundle, made anew from the store if the index does not know it."""
        return self.index.get(key) or self._adopt(key, self._generations(key))

    def is_whole(self, key: str) -> bool:
        """Whether the manifest of a bundle can be read, so that a repeated put would mend nothing."""
        try:
            self.read_manifest(key)
        except (NotFound, DataLoss):
            return False
        return True

    def remove(self, key: str) -> None:
        """Remove a bundle; the files go first, so that a full disk has room for the index to say so."""
        for generation in self._generations(key):
            self._root.remove_folder(_folder(key, generation))
        self.index.remove(key)

    # Keeping the index and the store in step

    def reconcile(self) -> None:
        """Make the index say what the store holds, and remove what dead writers left unfinished."""
        # The index first: what another process commits meanwhile is then listed but not known, and is added.
        known = self.index.keys()
        stored: dict[str, list[str]] = {}
        for folder in self._root.folders(_BUNDLES, _MARK):
            key, _, generation = folder.removeprefix(_BUNDLES).removesuffix("/").rpartition(f"/{_MARK}")
            if _GENERATION.fullmatch(generation) and _is_key(key, self._settings):
                stored.setdefault(key, []).append(generation)
        with self.index.batch():
            for key in known.keys() - stored.keys():
                self.index.remove(key)
            for key, generations in stored.items():
                if generations != [known.get(key)]:
                    self._settle(key, sorted(generations), known.get(key))
        self._writers.forget_dead()
        self._root.empty_trash()

    def _settle(self, key: str, generations: list[str], known: str | None) -> None:
        entry = self._adopt(key, generations)
        self._remove_superseded(key, generations, entry.generation if entry is not None else known)

    def _remove_superseded(self, key: str, generations: list[str], newest: str | None) -> None:
        """Remove what is older than the newest, and what was begun by a process that is gone."""
        for generation in generations:
            if self._is_begun(key, generation):
                removable = generation != newest and self._is_orphan(generation)
            else:
                removable = newest is not None and generation < newest
            if removable:
                self._root.remove_folder(_folder(key, generation))

    def _is_begun(self, key: str, generation: str) -> bool:
        """Whether nothing has been committed to a generation; a damaged one has been."""
        try:
            return self._database(key, generation).read_record() is None
        except DataLoss:
            return False

    def _is_orphan(self, generation: str) -> bool:
        moment, _, writer = generation.partition("-")
        if self._root.directory is not None:
            return not self._writers.is_alive(writer)
        return int(moment, 16) / 1e9 < self._clock() - self._settings.orphan_seconds

    def _adopt(self, key: str, generations: list[str]) -> Entry | None:
        """Note the newest committed generation in the index."""
        for generation in reversed(generations):
            try:
                record = self._database(key, generation).read_record()
            except DataLoss as error:
                log.warning("not in the index: %s", error)
                continue
            if record is not None:
                # A touched lease is known to the index alone; without it the lease starts anew, so the bundle stays longer.
                expires_at = None if record.ttl is None else self._clock() + record.ttl
                return self._note(key, generation, record, expires_at=expires_at)
        return None

    def _note(self, key: str, generation: str, record: Record, *, expires_at: float | None) -> Entry:
        manifest = record.manifest
        stat = stat_of(key, manifest, tier="durable", arrived=record.arrived, expires_at=expires_at)
        paths = [f"{leaf.index} ({leaf.path})" for leaf in manifest.leaves]
        entry = Entry(stat=stat, generation=generation, paths=" to ".join(paths[:1] + paths[1:][-1:]))
        self.index.set(entry)
        return entry

    # Generations

    def _generations(self, key: str) -> list[str]:
        prefix = f"{_BUNDLES}{key}/{_MARK}"
        folders = self._root.folders(f"{_BUNDLES}{key}/", _MARK)
        names = (folder[len(prefix) : -1] for folder in folders if folder.startswith(prefix))
        return sorted(filter(_GENERATION.fullmatch, names))

    def _next_generation(self, before: list[str]) -> str:
        newest = int(before[-1].partition("-")[0], 16) if before else 0
        return f"{max(time.time_ns(), newest + 1):016x}-{self._writers.own}"

    def _database(self, key: str, generation: str) -> Database:
        folder = _folder(key, generation)
        self._root.check_inside(folder)
        spec = self._root.spec(folder)
        return Database(spec, context=self._root.context, settings=self._settings, what=f"the bundle {key!r}")


def _folder(key: str, generation: str) -> str:
    return f"{_BUNDLES}{key}/{_MARK}{generation}/"


def _is_key(key: str, settings: Settings) -> bool:
    try:
        check_key(key, settings)
    except InvalidKey:
        return False
    return True
