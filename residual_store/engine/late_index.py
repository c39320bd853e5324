"""The late index: the index of the host tier, which learns of changes when somebody asks it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from residual_store.engine.index import Entry, Index
from residual_store.engine.large_leaf import LargeLeaf
from residual_store.manifest import Manifest
from residual_store.store import Stat

__all__ = ["LateIndex"]

_MOST_CHANGES = 64
_MOST_LEAVES = 4096
"""Of changes that are yet to be made, and of leaves in them: all at once they take some milliseconds at most."""


class LateIndex:
    """Notes the changes of an `Index` in memory and makes them in `current`, many at once: a put waits for no table.

    ``shared_bytes`` is the least size of a leaf that bundles share.
    The caller makes one call at a time.
    """

    def __init__(self, *, shared_bytes: int) -> None:
        self._index = Index(None, tier="host")
        self._shared_bytes = shared_bytes
        self._changes: list[Callable[[], object]] = []
        self._leaves = 0

    def close(self) -> None:
        self._changes.clear()
        self._index.close()

    def current(self) -> Index:
        """The index, with all changes until now."""
        if self._changes:
            with self._index.batch():
                for change in self._changes:
                    change()
            self._changes.clear()
            self._leaves = 0
        return self._index

    def set(self, stat: Stat, manifest: Manifest, *, until: float) -> None:
        """Insert or replace the row of a bundle; ``until`` is as in `remove`."""
        self._leaves += len(manifest.leaves)
        self._note(partial(self._set, stat, manifest, until))

    def _set(self, stat: Stat, manifest: Manifest, until: float) -> None:
        leaves = LargeLeaf.all_of(stat.key, manifest, self._shared_bytes)
        self._index.set(Entry(stat=stat, leaves=leaves), until=until)

    def remove(self, key: str, *, until: float) -> None:
        """Forget a bundle; the shared leaves that only it had stay ``until`` then at least."""
        self._note(partial(self._index.remove, key, until=until))

    def lease(self, key: str, expires_at: float | None) -> None:
        """Set when the lease of a bundle ends."""
        self._note(partial(self._index.lease, key, expires_at))

    def extend(self, shared_key: str, expires_at: float) -> None:
        """Let a shared leaf stay until then at least."""
        self._note(partial(self._index.extend, shared_key, expires_at))

    def _note(self, change: Callable[[], object]) -> None:
        self._changes.append(change)
        if len(self._changes) > _MOST_CHANGES or self._leaves > _MOST_LEAVES:
            self.current()
