"""Writers: which processes have a root open, told by locks that end with the process, however it ends."""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
from collections.abc import Iterator
from pathlib import Path

__all__ = ["Writers"]

_DOOR = "door"


class Writers:
    """The lock files ``<root>/writers/<name>``, one held by each process that has the root open.

    ``own`` is the name of this process's stay; it is a part of every generation that it writes.
    Without a directory there are no locks, and who is alive cannot be told.
    """

    def __init__(self, directory: Path | None) -> None:
        self.own = secrets.token_hex(6)
        self._folder = directory / "writers" if directory is not None else None
        self._lock: int | None = None
        if self._folder is not None:
            self._folder.mkdir(exist_ok=True)
            with self._door(self._folder):
                self._lock = os.open(self._folder / self.own, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
                fcntl.flock(self._lock, fcntl.LOCK_EX)

    def close(self) -> None:
        if self._folder is not None and self._lock is not None:
            (self._folder / self.own).unlink(missing_ok=True)
            os.close(self._lock)
            self._lock = None

    def is_alive(self, name: str) -> bool:
        """Whether the process that was given this name still has the root open."""
        return self._folder is not None and not _is_free(self._folder / name)

    def forget_dead(self) -> None:
        """Remove the lock files that nobody holds."""
        if self._folder is None:
            return
        with self._door(self._folder):
            for lock in self._folder.iterdir():
                if lock.name != _DOOR and _is_free(lock):
                    lock.unlink(missing_ok=True)

    @contextlib.contextmanager
    def _door(self, folder: Path) -> Iterator[None]:
        """Keep a newcomer from being taken for dead between the making of its file and the locking of it."""
        descriptor = os.open(folder / _DOOR, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield
        finally:
            os.close(descriptor)


def _is_free(lock: Path) -> bool:
    try:
        descriptor = os.open(lock, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return True
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    finally:
        os.close(descriptor)
    return True
