"""The root: the place below which a durable tier keeps its bundles, in any tensorstore key-value store.

On a file system it also knows which writers are alive, so that what a killed process left behind can be removed.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import secrets
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Self

import tensorstore as ts

from residual_store.engine.faults import told_apart
from residual_store.errors import InvalidOption

__all__ = ["Root"]


class Root:
    """A key-value store, given by its URL or its JSON spec, and on a file system the directory behind it.

    ``writer`` is the name of this process's stay at the root; it is a part of every generation that it writes.
    """

    def __init__(self, url: str) -> None:
        self.url = url
        self.context = ts.Context({"cache_pool": {"total_bytes_limit": 0}})
        try:
            given = json.loads(url) if url.startswith("{") else url
            self._spec: dict[str, Any] = ts.KvStore.Spec(given).to_json()
            self._spec["path"] = (
                self._spec.get("path", "").rstrip("/") + "/" if self._spec.get("path") else ""
            )
            self.kv = ts.KvStore.open(self._spec, context=self.context).result()
        except ValueError as error:
            raise InvalidOption(f"{url!r} is not the URL of a store: {error}") from error
        self.directory = Path(self._spec["path"]) if self._spec["driver"] == "file" else None
        self.writer = secrets.token_hex(6)
        self.dead_writers: frozenset[str] = frozenset()
        self._directories = threading.Lock()
        self._stay: int | None = None
        if self.directory is not None:
            self.directory.mkdir(parents=True, exist_ok=True)
            self._resolved = self.directory.resolve()
            self._stay = self._enter(self.directory)

    def spec(self, path: str) -> dict[str, Any]:
        """The tensorstore spec of the key-value store below ``path``, which ends with a slash."""
        return {**self._spec, "path": self._spec["path"] + path}

    def close(self) -> None:
        if self._stay is not None and self.directory is not None:
            (self.directory / "writers" / self.writer).unlink(missing_ok=True)
            os.close(self._stay)
            self._stay = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _enter(self, directory: Path) -> int:
        """Hold a lock for as long as this process lives, and find out whose locks nobody holds any more."""
        stays = directory / "writers"
        stays.mkdir(exist_ok=True)
        with _locked(stays / "door"):
            dead = [stay for stay in stays.iterdir() if stay.name != "door" and _is_free(stay)]
            self.dead_writers = frozenset(stay.name for stay in dead)
            own = os.open(stays / self.writer, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
            fcntl.flock(own, fcntl.LOCK_EX)
        return own

    def forget_dead_writers(self) -> None:
        """Remove the locks of dead writers, once what they left behind is gone."""
        if self.directory is not None:
            for name in self.dead_writers:
                (self.directory / "writers" / name).unlink(missing_ok=True)

    def check_inside(self, path: str) -> None:
        """Raise `InvalidOption` if a symbolic link leads ``path`` out of the root."""
        if self.directory is not None and not (self.directory / path).resolve().is_relative_to(
            self._resolved
        ):
            raise InvalidOption(f"{path} leaves the root through a symbolic link; remove that link")

    def make_directory(self, path: str) -> None:
        """Make ``path`` and what lies above it, so that a crash of the machine cannot undo it later."""
        if self.directory is None:
            return
        self.check_inside(path)
        with self._directories:
            missing = [self.directory / path]
            while not missing[-1].parent.exists():
                missing.append(missing[-1].parent)
            for folder in reversed(missing):
                folder.mkdir(exist_ok=True)
                _sync_directory(folder.parent)

    def remove(self, path: str) -> None:
        """Remove all below ``path``, which ends with a slash, and on a file system the empty directories above it."""
        self.check_inside(path)
        with told_apart(f"removing {path}"):
            self.kv.delete_range(ts.KvStore.KeyRange(path, _after(path))).result()
        if self.directory is None:
            return
        with self._directories:
            for below, _, _ in os.walk(self.directory / path, topdown=False):
                _remove_empty(Path(below))
            for above in (self.directory / path).parents:
                if above == self.directory or not _remove_empty(above):
                    break

    def read(self, path: str) -> bytes | None:
        """The value of one key, or None if there is none."""
        with told_apart(f"reading {path}"):
            found = self.kv.read(path).result()
        return bytes(found.value) if found.state == "value" else None

    def write(self, path: str, value: bytes) -> None:
        """Set the value of one key, whole or not at all."""
        with told_apart(f"writing {path}"):
            self.kv.write(path, value).result()

    def delete(self, path: str) -> None:
        """Delete one key."""
        with told_apart(f"deleting {path}"):
            self.kv.write(path, None).result()

    def list(self, path: str) -> list[str]:
        """All keys below ``path``, as text relative to the root."""
        with told_apart(f"listing {path}"):
            listing = self.kv.list(ts.KvStore.KeyRange(path, _after(path))).result()
        return [key.decode("utf-8", "surrogateescape") for key in listing]


def _after(path: str) -> str:
    return path[:-1] + chr(ord(path[-1]) + 1)


def _remove_empty(folder: Path) -> bool:
    try:
        folder.rmdir()
    except OSError:
        return False
    return True


def _sync_directory(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    descriptor = os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _is_free(path: Path) -> bool:
    descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    finally:
        os.close(descriptor)
    return True
