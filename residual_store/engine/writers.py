"""Writers: which processes have a root open, told by locks that end with the process, however it ends."""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
from collections.abc import Iterator
from pathlib import Path

from residual_store.range_lock import unlock, wait_for

__all__ = ["Writers"]

_DOOR = "door"
_USE, _GATE = 1, 2


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
    def sharing(self, *, to_collect: bool = False) -> Iterator[None]:
        """Keep shared leaves from being collected while somebody finds them and commits a bundle that has them.

        Those who use leaves hold it together, and who wants ``to_collect`` holds it alone.
        """
        assert self._folder is not None
        descriptor = os.open(self._folder / _DOOR, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        try:
            # Through the gate one by one, so that a collector who waits is not passed for ever.
            wait_for(descriptor, _GATE, alone=True)
            wait_for(descriptor, _USE, alone=to_collect)
            unlock(descriptor, _GATE)
            yield
        finally:
            os.close(descriptor)

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
