"""Generations: the directories ``bundles/<key>/@<generation>/``, one for each put."""

from __future__ import annotations

import re
import time
from collections.abc import Callable

from residual_store.engine.database import Database
from residual_store.engine.root import Root
from residual_store.engine.writers import Writers
from residual_store.errors import InvalidKey
from residual_store.key import check_key
from residual_store.settings import Settings
from residual_store.shared_leaf import is_shared_key

__all__ = ["Generations"]

_BUNDLES = "bundles/"
_MARK = "@"
_NAME = re.compile(r"[0-9a-f]{1,16}-[0-9a-f]{12}")


class Generations:
    """The generations of each key, by name: ``<time>-<writer>``, so that the newest is the greatest."""

    def __init__(
        self, root: Root, *, writers: Writers, settings: Settings, clock: Callable[[], float]
    ) -> None:
        self._root = root
        self._writers = writers
        self._settings = settings
        self._clock = clock

    def folder(self, key: str, generation: str) -> str:
        """Where the database of a generation lies below the root; raises `InvalidOption` if a link leads out of it."""
        folder = f"{_BUNDLES}{key}/{_MARK}{generation}/"
        self._root.check_inside(folder)
        return folder

    def database(self, key: str, generation: str) -> Database:
        """The database of a generation, to be closed after use; raises `InvalidOption` as `folder` does."""
        folder = self.folder(key, generation)
        return Database(
            self._root.spec(folder),
            context=self._root.context,
            settings=self._settings,
            what=f"the bundle {key!r}",
            directory=self._root.directory / folder if self._root.directory is not None else None,
        )

    def is_begun(self, key: str, generation: str) -> bool:
        """Whether nothing of a generation has been committed yet."""
        with self.database(key, generation) as database:
            return database.is_begun()

    def of(self, key: str) -> list[str]:
        """The generations of one key, the oldest first, committed or not."""
        names = (name[len(_MARK) :] for name in self._root.names(f"{_BUNDLES}{key}/", _MARK))
        return sorted(filter(_NAME.fullmatch, names))

    def all(self, run: str = "") -> dict[str, list[str]]:
        """The generations of every key, or every one of a run, from their names alone.

        On a file system, empty folders are removed on the way.
        """
        found: dict[str, list[str]] = {}
        for folder in self._root.folders(f"{_BUNDLES}{run}/" if run else _BUNDLES, _MARK):
            key, _, generation = folder.removeprefix(_BUNDLES).removesuffix("/").rpartition(f"/{_MARK}")
            if _NAME.fullmatch(generation) and self._is_key(key):
                found.setdefault(key, []).append(generation)
        return {key: sorted(generations) for key, generations in found.items()}

    def next(self, key: str) -> str:
        """A name for a generation of this process that is newer than all others of its key."""
        before = self.of(key)
        newest = int(before[-1].partition("-")[0], 16) if before else 0
        return f"{max(time.time_ns(), newest + 1):016x}-{self._writers.own}"

    def make(self, key: str, generation: str) -> None:
        """Make the folder of a generation, so that a crash of the machine cannot undo it later."""
        self._root.make_folder(self.folder(key, generation))

    def remove(self, key: str, generation: str) -> None:
        """Remove a generation with all that is in it, in one step."""
        self._root.remove_folder(self.folder(key, generation))

    def is_abandoned(self, generation: str) -> bool:
        """Whether the process that wrote a generation is gone, so that it will not be committed any more."""
        moment, _, writer = generation.partition("-")
        if self._root.directory is not None:
            return not self._writers.is_alive(writer)
        return int(moment, 16) / 1e9 < self._clock() - self._settings.orphan_seconds

    def _is_key(self, key: str) -> bool:
        if is_shared_key(key):
            return True
        try:
            check_key(key, self._settings)
        except InvalidKey:
            return False
        return True
