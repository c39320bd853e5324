"""The file of an index: its tables in sqlite, which several threads and processes may have open."""

from __future__ import annotations

import contextlib
import os
import sqlite3
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from residual_store.errors import InternalError, Stopping, StoreFull
from residual_store.translation import Translation

__all__ = ["IndexFile"]

_VERSION = 2
_TIMEOUT_SECONDS = 30.0
_IN_USE = (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED, sqlite3.SQLITE_PROTOCOL)
_DAMAGE = (sqlite3.SQLITE_ERROR, sqlite3.SQLITE_IOERR_SHORT_READ)
"""Such as a table with other columns, and a file that was cut off; other operational errors say nothing of the file."""

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


class IndexFile:
    """A connection to the tables, in memory if there is no ``path``; safe to use from several threads.

    A damaged file, or one of another version, is thrown away: the store has the truth.
    """

    def __init__(self, path: Path | None) -> None:
        self._lock = threading.RLock()
        with Translation(_translate):
            self._database = _open(path)

    def close(self) -> None:
        with self._lock:
            self._database.close()

    def run(self, statement: str, *values: object) -> list[tuple[object, ...]]:
        """The rows that one statement gives; raises `InternalError`, or `StoreFull` if the disk is."""
        with self._lock, Translation(_translate):
            return self._database.execute(statement, values).fetchall()

    def run_for_each(self, statement: str, rows: Sequence[tuple[object, ...]]) -> None:
        """Run one statement with the values of each row; raises what `run` does."""
        with self._lock, Translation(_translate):
            self._database.executemany(statement, rows)

    @contextlib.contextmanager
    def batch(self) -> Iterator[None]:
        """Make many changes in one transaction, all of them or none."""
        with self._lock:
            if self._database.in_transaction:
                yield
                return
            self.run("BEGIN IMMEDIATE")
            try:
                yield
                self.run("COMMIT")
            except BaseException:
                # A full disk may have ended the transaction already.
                if self._database.in_transaction:
                    self.run("ROLLBACK")
                raise


def _translate(error: Exception) -> None:
    match error:
        case sqlite3.ProgrammingError():
            raise Stopping("this store was closed; open it again") from error
        case sqlite3.OperationalError() if "full" in str(error):
            raise StoreFull("there is no room on the disk for the index") from error
        case sqlite3.OperationalError():
            raise InternalError(
                f"the index failed: {error}; is there room on the disk, and may this process write below the root?"
            ) from error
        case sqlite3.DatabaseError():
            raise InternalError(
                f"the index is damaged: {error}; stop, delete index.sqlite and start again"
            ) from error


def _open(path: Path | None) -> sqlite3.Connection:
    try:
        return _connect_in_turn(path)
    except (sqlite3.DatabaseError, UnicodeDecodeError) as error:
        # What cannot be opened now may be in use by others, and what it says of leases may stand nowhere else.
        if path is None or not _is_damage(error, path):
            raise
        for stale in path.parent.glob(path.name + "*"):
            stale.unlink(missing_ok=True)
        return _connect_in_turn(path)


def _is_damage(error: Exception, path: Path) -> bool:
    if not isinstance(error, sqlite3.OperationalError):
        return True
    # A file that may be written says that it may not, if it is damaged where it names its format.
    is_format = error.sqlite_errorcode == sqlite3.SQLITE_READONLY and os.access(path, os.W_OK)
    return is_format or error.sqlite_errorcode in _DAMAGE


def _connect_in_turn(path: Path | None) -> sqlite3.Connection:
    """Connect; wait while another store makes or closes the index, for which sqlite itself does not always wait."""
    deadline = time.monotonic() + _TIMEOUT_SECONDS
    while True:
        try:
            return _connect(path)
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode & 0xFF not in _IN_USE:
                raise
            if time.monotonic() > deadline:
                raise InternalError(f"the index cannot be opened: {error}") from error
        time.sleep(0.005)


def _connect(path: Path | None) -> sqlite3.Connection:
    database = sqlite3.connect(
        path or ":memory:", check_same_thread=False, isolation_level=None, timeout=_TIMEOUT_SECONDS
    )
    try:
        _prepare(database)
    except sqlite3.DatabaseError:
        database.close()
        raise
    return database


def _prepare(database: sqlite3.Connection) -> None:
    database.execute("PRAGMA journal_mode = WAL")
    database.execute("PRAGMA synchronous = NORMAL")
    (version,) = database.execute("PRAGMA user_version").fetchone()
    (health,) = database.execute("PRAGMA quick_check(1)").fetchone()
    if version not in (0, _VERSION) or health != "ok":
        raise sqlite3.DatabaseError(f"the index has version {version} and is {health}")
    database.executescript(_SCHEMA)
    database.execute(f"PRAGMA user_version = {_VERSION}")
