"""The durable tier: bundles and programs in tensorstore.

``bundles/<key>/@<generation>/`` is one database for each bundle, and ``programs/<fingerprint>`` one value for each program.
A generation is new for each put, so a replacement appears in one step and what a crash leaves behind is told apart.
"""

from __future__ import annotations

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
from residual_store.errors import DataLoss, InvalidKey, NotFound
from residual_store.key import check_key
from residual_store.manifest import Manifest
from residual_store.settings import Settings
from residual_store.stat import stat_of

__all__ = ["DurableTier"]

_BUNDLES = "bundles/"
_COMMITTED = "manifest.ocdbt"


class DurableTier:
    """Bundles below a root; the caller keeps two writers of one key apart."""

    def __init__(self, root: Root, *, settings: Settings, clock: Callable[[], float] = time.time) -> None:
        self._root = root
        self.programs = DurablePrograms(root)
        self._settings = settings
        self._clock = clock
        self.index = Index(root.directory / "index.sqlite" if root.directory else None, tier="durable")
        self.reconcile()

    def close(self) -> None:
        self.index.close()
        self._root.close()

    # Bundles

    def write(self, key: str, bundle: Bundle, *, arrived: float, ttl: float | None) -> Entry:
        """Commit a bundle as the newest generation of its key, then remove the older ones."""
        before = self._generations(key)
        generation = self._next_generation(before)
        path = _path(key, generation)
        self._root.make_directory(path)
        try:
            packed_below = self._settings.packed_leaf_bytes
            record = Record(manifest=bundle.manifest, arrived=arrived, ttl=ttl, packed_below=packed_below)
            self._database(key, generation).write(bundle, record)
        except BaseException:
            self._root.remove(path)
            raise
        entry = self._note(key, generation, record, expires_at=None if ttl is None else arrived + ttl)
        for old in before:
            self._remove_generation(key, old)
        return entry

    def read(self, key: str, allocate: Callable[[int], Payload]) -> Bundle:
        """The whole bundle, verified, in a segment from ``allocate``; raises `NotFound` or `DataLoss`."""
        database = self._database(key, self._generation(key))
        record = database.read_record()
        return database.read(record, allocate(record.manifest.nbytes))

    def read_manifest(self, key: str) -> Manifest:
        """The manifest of a bundle, from the store."""
        return self._database(key, self._generation(key)).read_record().manifest

    def read_leaf(self, key: str, index: int, allocate: Callable[[int], Payload]) -> npt.NDArray[np.generic]:
        """One leaf, verified, without reading the other large ones."""
        database = self._database(key, self._generation(key))
        record = database.read_record()
        source = record.manifest.source(index)
        payload = database.read_leaf(record, source, allocate(source.nbytes))
        return decode(source, payload, as_leaf=record.manifest.leaves[index])

    def find(self, key: str) -> Entry | None:
        """The index's entry of a bundle, made anew from the store if the index does not know it."""
        entry = self.index.get(key)
        if entry is not None:
            return entry
        committed = [name for name in self._generations(key) if self._is_committed(key, name)]
        return self._adopt(key, committed[-1]) if committed else None

    def remove(self, key: str) -> None:
        """Remove a bundle; it is invisible after the first step of this."""
        for generation in self._generations(key):
            self._remove_generation(key, generation)
        self.index.remove(key)

    # Keeping the index and the store in step

    def reconcile(self) -> None:
        """Make the index say what the store holds, and remove what dead writers left unfinished."""
        # The index first: what another process commits meanwhile is then listed but not known, and is added.
        known = self.index.keys()
        stored: dict[str, dict[str, bool]] = {}
        for path in self._root.list(_BUNDLES):
            key, generation, file = _split(path)
            generations = stored.setdefault(key, {})
            generations[generation] = generations.get(generation, False) or file == _COMMITTED
        with self.index.batch():
            for key in known.keys() - stored.keys():
                self.index.remove(key)
            for key, generations in stored.items():
                self._settle(key, generations, known.get(key))
        self._root.forget_dead_writers()

    def _settle(self, key: str, generations: dict[str, bool], known: str | None) -> None:
        committed = sorted(name for name, whole in generations.items() if whole)
        unfinished = [name for name, whole in generations.items() if not whole and name != known]
        for name in committed[:-1] + [name for name in unfinished if self._is_orphan(name)]:
            self._root.remove(_path(key, name))
        if committed and known != committed[-1] and _is_key(key, self._settings):
            self._adopt(key, committed[-1])

    def _is_orphan(self, generation: str) -> bool:
        moment, _, writer = generation.partition("-")
        if self._root.directory is not None:
            return writer in self._root.dead_writers
        return int(moment, 16) / 1e9 < self._clock() - self._settings.orphan_seconds

    def _adopt(self, key: str, generation: str) -> Entry | None:
        try:
            record = self._database(key, generation).read_record()
        except DataLoss:
            return None
        # A touched lease is known to the index alone; without it the lease starts anew, which keeps a bundle longer.
        expires_at = None if record.ttl is None else self._clock() + record.ttl
        return self._note(key, generation, record, expires_at=expires_at)

    def _note(self, key: str, generation: str, record: Record, *, expires_at: float | None) -> Entry:
        manifest = record.manifest
        stat = stat_of(key, manifest, tier="durable", arrived=record.arrived, expires_at=expires_at)
        paths = [f"{leaf.index} ({leaf.path})" for leaf in manifest.leaves]
        entry = Entry(stat=stat, generation=generation, paths=" to ".join(paths[:1] + paths[1:][-1:]))
        self.index.set(entry)
        return entry

    # Generations

    def _generation(self, key: str) -> str:
        entry = self.find(key)
        if entry is not None and self._is_committed(key, entry.generation):
            return entry.generation
        if entry is not None and self._generations(key):
            raise DataLoss(
                f"the bundle {key!r} is damaged on disk: its database is gone, and leaves {entry.paths} with it"
            )
        self.index.remove(key)
        raise NotFound(f"there is no bundle {key!r}", key=key)

    def _generations(self, key: str) -> list[str]:
        prefix = f"{_BUNDLES}{key}/@"
        return sorted({path[len(prefix) :].partition("/")[0] for path in self._root.list(prefix)})

    def _next_generation(self, before: list[str]) -> str:
        newest = int(before[-1].partition("-")[0], 16) if before else 0
        return f"{max(time.time_ns(), newest + 1):016x}-{self._root.writer}"

    def _is_committed(self, key: str, generation: str) -> bool:
        return self._root.read(_path(key, generation) + _COMMITTED) is not None

    def _remove_generation(self, key: str, generation: str) -> None:
        path = _path(key, generation)
        self._root.delete(path + _COMMITTED)
        self._root.remove(path)

    def _database(self, key: str, generation: str) -> Database:
        path = _path(key, generation)
        self._root.check_inside(path)
        spec = self._root.spec(path)
        return Database(spec, context=self._root.context, settings=self._settings, what=f"the bundle {key!r}")


def _path(key: str, generation: str) -> str:
    return f"{_BUNDLES}{key}/@{generation}/"


def _split(path: str) -> tuple[str, str, str]:
    key, _, rest = path.removeprefix(_BUNDLES).partition("/@")
    generation, _, file = rest.partition("/")
    return key, generation, file


def _is_key(key: str, settings: Settings) -> bool:
    try:
        check_key(key, settings)
    except InvalidKey:
        return False
    return True
