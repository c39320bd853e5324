"""The index: a cache, in sqlite, of what the manifests in the store say.

It answers listings, sizes and leases without opening bundles.
It can be deleted at any time the store is closed, and is rebuilt from the store.
"""

from __future__ import annotations

import contextlib
import sqlite3
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from residual_store.engine.large_leaf import LargeLeaf
from residual_store.errors import InternalError, StoreFull
from residual_store.key import run_of
from residual_store.store import RunUsage, Stat, Tier

__all__ = ["Entry", "Index"]

_VERSION = 2
_SCHEMA = """
CREATE TABLE IF NOT EXISTS bundles (
    key TEXT PRIMARY KEY, run TEXT NOT NULL, generation TEXT NOT NULL, fingerprint TEXT, leaves INTEGER NOT NULL,
    nbytes INTEGER NOT NULL, array_nbytes INTEGER NOT NULL, arrived REAL NOT NULL, expires_at REAL,
    digest TEXT NOT NULL, content TEXT NOT NULL, paths TEXT NOT NULL
) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS by_expiry ON bundles (expires_at) WHERE expires_at IS NOT NULL;
CREATE TABLE IF NOT EXISTS leaves (
    key TEXT NOT NULL, number INTEGER NOT NULL, shared_key TEXT NOT NULL, is_shared INTEGER NOT NULL,
    PRIMARY KEY (key, number)
) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS by_shared_key ON leaves (shared_key);
"""
_USED = "EXISTS (SELECT 1 FROM leaves WHERE shared_key = bundles.key AND is_shared)"
_OF_A_CALLER = "instr(bundles.key, '/~') = 0"
"""What distinguishes a bundle of a caller from a shared leaf."""

_COLUMNS = (
    "key, fingerprint, leaves, nbytes, array_nbytes, arrived, expires_at, digest, content, generation, paths"
)


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One row: the bundle's `Stat`, the generation of its database, its leaf paths for messages, and its large leaves."""

    stat: Stat
    generation: str = ""
    paths: str = ""
    leaves: tuple[LargeLeaf, ...] = ()


class Index:
    """The rows of one tier; safe to use from several threads, and on a file from several processes.

    ``until`` says when the lease of a shared leaf ends whose last bundle goes now.
    """

    def __init__(
        self, path: Path | None, *, tier: Tier, until: Callable[[], float] = lambda: time.time() + 30.0
    ) -> None:
        self.tier = tier
        self._until = until
        self._lock = threading.RLock()
        self._database = _open(path)

    def close(self) -> None:
        with self._lock:
            self._database.close()

    def _run(self, statement: str, *values: object) -> list[tuple[object, ...]]:
        with self._lock, _told_apart():
            return self._database.execute(statement, values).fetchall()

    def set(self, entry: Entry) -> None:
        """Insert or replace the row of one bundle."""
        stat = entry.stat
        with self.batch():
            self._set(stat, entry)

    def _set(self, stat: Stat, entry: Entry) -> None:
        self._release(stat.key)
        self._run(
            f"INSERT OR REPLACE INTO bundles ({_COLUMNS}, run) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",  # noqa: S608
            *(
                stat.key,
                stat.fingerprint,
                stat.leaves,
                stat.nbytes,
                stat.array_nbytes,
                stat.arrived,
                stat.expires_at,
            ),
            *(stat.digest, stat.content, entry.generation, entry.paths, run_of(stat.key)),
        )
        for leaf in entry.leaves:
            self._run(
                "INSERT INTO leaves (key, number, shared_key, is_shared) VALUES (?, ?, ?, ?)",
                *(stat.key, leaf.number, leaf.shared_key, leaf.is_shared),
            )

    def get(self, key: str) -> Entry | None:
        """The row of one bundle, if there is one."""
        rows = self._run(f"SELECT {_COLUMNS} FROM bundles WHERE key = ?", key)  # noqa: S608
        return self._entry(rows[0]) if rows else None

    def remove(self, key: str) -> None:
        """Forget one bundle."""
        with self.batch():
            self._release(key)
            self._run("DELETE FROM bundles WHERE key = ?", key)

    def _release(self, key: str) -> None:
        """Forget the leaves of one bundle; the shared ones of them stay for a while."""
        if not self._run("SELECT 1 FROM leaves WHERE key = ? LIMIT 1", key):
            return
        self._run(
            "UPDATE bundles SET expires_at = max(expires_at, ?) WHERE key IN "
            "(SELECT shared_key FROM leaves WHERE key = ? AND is_shared)",
            *(self._until(), key),
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

    @contextlib.contextmanager
    def batch(self) -> Iterator[None]:
        """Make many changes in one transaction."""
        with self._lock:
            if self._database.in_transaction:
                yield
                return
            self._run("BEGIN IMMEDIATE")
            try:
                yield
            finally:
                self._run("COMMIT")

    def _entry(self, row: Iterable[object]) -> Entry:
        (
            key,
            fingerprint,
            leaves,
            nbytes,
            array_nbytes,
            arrived,
            expires_at,
            digest,
            content,
            generation,
            paths,
        ) = row
        stat = Stat(
            key=str(key),
            tier=self.tier,
            durability="host" if self.tier == "host" else "disk",
            fingerprint=None if fingerprint is None else str(fingerprint),
            leaves=int(str(leaves)),
            nbytes=int(str(nbytes)),
            array_nbytes=int(str(array_nbytes)),
            arrived=float(str(arrived)),
            expires_at=None if expires_at is None else float(str(expires_at)),
            digest=str(digest),
            content=str(content),
        )
        return Entry(stat=stat, generation=str(generation), paths=str(paths))


@contextlib.contextmanager
def _told_apart() -> Iterator[None]:
    try:
        yield
    except sqlite3.ProgrammingError as error:
        raise InternalError("this store was closed; open it again") from error
    except sqlite3.OperationalError as error:
        if "full" in str(error):
            raise StoreFull("there is no room on the disk for the index") from error
        raise InternalError(f"the index failed: {error}") from error
    except sqlite3.DatabaseError as error:
        raise InternalError(
            f"the index is damaged: {error}; stop, delete index.sqlite and start again"
        ) from error


def _open(path: Path | None) -> sqlite3.Connection:
    try:
        return _connect(path)
    except sqlite3.DatabaseError:
        if path is None:
            raise
        # A damaged index, or one of another version, is worth nothing: the store has the truth.
        for stale in path.parent.glob(path.name + "*"):
            stale.unlink(missing_ok=True)
        return _connect(path)


def _connect(path: Path | None) -> sqlite3.Connection:
    database = sqlite3.connect(
        path or ":memory:", check_same_thread=False, isolation_level=None, timeout=30.0
    )
    database.execute("PRAGMA journal_mode = WAL")
    database.execute("PRAGMA synchronous = NORMAL")
    (version,) = database.execute("PRAGMA user_version").fetchone()
    (health,) = database.execute("PRAGMA quick_check(1)").fetchone()
    if version not in (0, _VERSION) or health != "ok":
        database.close()
        raise sqlite3.DatabaseError(f"the index has version {version} and is {health}")
    database.executescript(_SCHEMA)
    database.execute(f"PRAGMA user_version = {_VERSION}")
    return database
