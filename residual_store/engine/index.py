"""The index: a cache, in sqlite, of what the manifests in the store say.

It answers listings, sizes and leases without opening bundles.
It can be deleted at any time the store is closed, and is rebuilt from the store.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Self

from residual_store.engine.index_file import IndexFile
from residual_store.engine.large_leaf import LargeLeaf
from residual_store.key import run_of
from residual_store.manifest import Manifest
from residual_store.store import Durability, RunUsage, Stat, Tier

__all__ = ["Entry", "Index"]

_USED = "EXISTS (SELECT 1 FROM leaves WHERE shared_key = bundles.key AND is_shared)"
_OF_A_CALLER = "instr(bundles.key, '/~') = 0"
"""What distinguishes a bundle of a caller from a shared leaf."""

_OF_STAT = tuple(field.name for field in fields(Stat) if field.name not in ("tier", "durability"))
_COLUMNS = ", ".join((*_OF_STAT, "generation", "paths"))


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One row: the bundle's `Stat`, the generation of its database, its leaf paths for messages, and its large leaves."""

    stat: Stat
    generation: str = ""
    paths: str = ""
    leaves: tuple[LargeLeaf, ...] = ()

    @classmethod
    def of(cls, stat: Stat, manifest: Manifest, *, generation: str, least: int) -> Self:
        """The row of a bundle whose large leaves have ``least`` bytes."""
        ends = manifest.leaves[:1] + manifest.leaves[1:][-1:]
        return cls(
            stat=stat,
            generation=generation,
            paths=" to ".join(f"{leaf.index} ({leaf.path})" for leaf in ends),
            leaves=LargeLeaf.all_of(stat.key, manifest, least),
        )


class Index:
    """The rows of one tier; safe to use from several threads, and on a file from several processes.

    ``until`` says when the lease of a shared leaf ends whose last bundle goes now.
    """

    def __init__(
        self, path: Path | None, *, tier: Tier, until: Callable[[], float] = lambda: time.time() + 30.0
    ) -> None:
        self.tier = tier
        self._until = until
        self._file = IndexFile(path)

    def close(self) -> None:
        self._file.close()

    def _run(self, statement: str, *values: object) -> list[tuple[object, ...]]:
        return self._file.run(statement, *values)

    def set(self, entry: Entry, *, until: float | None = None) -> None:
        """Insert or replace the row of one bundle; ``until`` is as in `remove`."""
        stat = entry.stat
        with self.batch():
            self._set(stat, entry, until)

    def _set(self, stat: Stat, entry: Entry, until: float | None) -> None:
        self._release(stat.key, until)
        values = [getattr(stat, name) for name in _OF_STAT]
        values += [entry.generation, entry.paths, run_of(stat.key)]
        self._run(
            f"INSERT OR REPLACE INTO bundles ({_COLUMNS}, run) VALUES ({', '.join('?' * len(values))})",  # noqa: S608
            *values,
        )
        self._file.run_for_each(
            "INSERT INTO leaves (key, number, shared_key, is_shared) VALUES (?, ?, ?, ?)",
            [(stat.key, leaf.number, leaf.shared_key, leaf.is_shared) for leaf in entry.leaves],
        )

    def get(self, key: str) -> Entry | None:
        """The row of one bundle, if there is one."""
        rows = self._run(f"SELECT {_COLUMNS} FROM bundles WHERE key = ?", key)  # noqa: S608
        return self._entry(rows[0]) if rows else None

    def remove(self, key: str, *, until: float | None = None) -> None:
        """Forget one bundle, which went some time ago if it is told ``until`` when the shared leaves that only it had stay."""
        with self.batch():
            self._release(key, until)
            self._run("DELETE FROM bundles WHERE key = ?", key)

    def _release(self, key: str, until: float | None) -> None:
        """Forget the leaves of one bundle; the shared ones of them stay for a while."""
        if not self._run("SELECT 1 FROM leaves WHERE key = ? LIMIT 1", key):
            return
        self._run(
            "UPDATE bundles SET expires_at = max(expires_at, ?) WHERE key IN "
            "(SELECT shared_key FROM leaves WHERE key = ? AND is_shared)",
            *(self._until() if until is None else until, key),
        )
        self._run("DELETE FROM leaves WHERE key = ?", key)

    # Shared leaves

    def holders(self, shared_key: str) -> list[tuple[str, int]]:
        """Keys of bundles, and the numbers of their own leaves that have the content of a shared one."""
        rows = self._run(
            "SELECT key, number FROM leaves WHERE shared_key = ? AND NOT is_shared LIMIT 4", shared_key
        )
        return [(str(key), int(str(number))) for key, number in rows]

    def extend(self, shared_key: str, expires_at: float) -> bool:
        """Let a shared leaf stay until then at least; false if there is none."""
        rows = self._run(
            "UPDATE bundles SET expires_at = max(expires_at, ?) WHERE key = ? RETURNING 1",
            *(expires_at, shared_key),
        )
        return bool(rows)

    def unused(self, now: float, *, prefix: str = "") -> list[str]:
        """The keys of shared leaves that start with ``prefix``, that no bundle has, and whose lease has ended."""
        rows = self._run(
            f"SELECT key FROM bundles WHERE expires_at <= ? AND NOT {_OF_A_CALLER} "  # noqa: S608
            f"AND substr(key, 1, length(?)) = ? AND NOT {_USED} ORDER BY expires_at",
            *(now, prefix, prefix),
        )
        return [str(key) for (key,) in rows]

    def exchange(self, key: str, old: Entry | None, new: Entry | None) -> None:
        """Put ``new`` in the place of ``old`` unless the generation in that place has changed; None is no row."""
        with self.batch():
            now = self.get(key)
            if (now and now.generation) != (old and old.generation):
                return
            if new is None:
                self.remove(key)
            else:
                self.set(new)

    def lease(self, key: str, expires_at: float | None) -> None:
        """Set when the lease of one bundle ends."""
        self._run("UPDATE bundles SET expires_at = ? WHERE key = ?", expires_at, key)

    def page(self, *, prefix: str, after: str, limit: int, now: float) -> list[Stat]:
        """The first ``limit`` living bundles after the key ``after`` whose key starts with ``prefix``."""
        # One lower bound, because sqlite walks from the first of two that it meets.
        bound, start = (">", after) if after >= prefix else (">=", prefix)
        rows = self._run(
            f"SELECT {_COLUMNS} FROM bundles WHERE key {bound} ? AND key < ? AND {_OF_A_CALLER} "  # noqa: S608
            "AND (expires_at IS NULL OR expires_at > ?) ORDER BY key LIMIT ?",
            *(start, prefix + "\U0010ffff", now, limit),
        )
        return [self._entry(row).stat for row in rows]

    def keys(self) -> dict[str, str]:
        """All keys with their generations."""
        return {
            str(key): str(generation) for key, generation in self._run("SELECT key, generation FROM bundles")
        }

    def expired(self, now: float) -> list[str]:
        """Keys whose lease has ended, the longest ended first."""
        rows = self._run(
            f"SELECT key FROM bundles WHERE expires_at <= ? AND {_OF_A_CALLER} ORDER BY expires_at",  # noqa: S608
            now,
        )
        return [str(key) for (key,) in rows]

    def usage(self) -> Iterator[RunUsage]:
        """Bundles and bytes by run; a shared leaf is no bundle, and counts once."""
        rows = self._run(
            f"SELECT run, sum({_OF_A_CALLER}), sum(nbytes) FROM bundles GROUP BY run ORDER BY run"  # noqa: S608
        )
        for run, bundles, nbytes in rows:
            yield RunUsage(run=str(run), tier=self.tier, bundles=int(str(bundles)), nbytes=int(str(nbytes)))

    def batch(self) -> AbstractContextManager[None]:
        """Make many changes in one transaction."""
        return self._file.batch()

    def _entry(self, row: Sequence[Any]) -> Entry:
        *of_stat, generation, paths = row
        durability: Durability = "host" if self.tier == "host" else "disk"
        known = dict(zip(_OF_STAT, of_stat, strict=True))
        stat = Stat(tier=self.tier, durability=durability, **known)
        return Entry(stat=stat, generation=generation, paths=paths)
