"""The root: the place below which a durable tier keeps its bundles, in any tensorstore key-value store."""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import tensorstore as ts

from residual_store.engine.faults import told_apart
from residual_store.errors import InternalError, InvalidOption

__all__ = ["Root"]

_ATTEMPTS = 100
_TRASH = "trash"
_SHELF = "parts/"


class Root:
    """A key-value store, given by its URL or its JSON spec, and on a file system the ``directory`` behind it.

    Paths are relative to the root; that of a folder ends with a slash.
    """

    def __init__(self, url: str) -> None:
        self.url = url
        self.context = ts.Context({"cache_pool": {"total_bytes_limit": 0}})
        try:
            given = json.loads(url) if url.startswith("{") else url
            self._spec: dict[str, Any] = ts.KvStore.Spec(given).to_json()
            self._spec["path"] = self._spec["path"].rstrip("/") + "/" if self._spec.get("path") else ""
            self._kv = ts.KvStore.open(self._spec, context=self.context).result()
        except ValueError as error:
            raise InvalidOption(f"{url!r} is not the URL of a store{_meant(url)}: {error}") from error
        self.directory = Path(self._spec["path"]) if self._spec["driver"] == "file" else None
        self._directories = threading.Lock()
        if self.directory is not None:
            try:
                (self.directory / _TRASH).mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise InvalidOption(f"{url} cannot be a root: {error.strerror}") from error

    def spec(self, folder: str) -> dict[str, Any]:
        """The tensorstore spec of the key-value store below a folder."""
        return {**self._spec, "path": self._spec["path"] + folder}

    # Parts of bundles that wait for others

    @property
    def shelf_url(self) -> str:
        """Where a store of such parts belongs: below this root, apart from its bundles."""
        return json.dumps(self.spec(_SHELF))

    @property
    def has_shelf(self) -> bool:
        """Whether there is such a store, as far as a file system tells."""
        return self.directory is not None and (self.directory / _SHELF).is_dir()

    # Single values

    def read(self, path: str) -> bytes | None:
        """The value at a path, or None if there is none."""
        with told_apart(f"reading {path}"):
            found = self._kv.read(path).result()
        return bytes(found.value) if found.state == "value" else None

    def starts(self, path: str, start: bytes) -> bool:
        """Whether there is a value at a path that starts with these bytes; reads no more of it."""
        if self.directory is not None:
            with contextlib.suppress(OSError), (self.directory / path).open("rb") as file:
                return file.read(len(start)) == start
            return False
        with told_apart(f"reading {path}"):
            try:
                found = self._kv.read(path, byte_range=slice(0, len(start))).result()
            except ValueError as error:
                if "OUT_OF_RANGE" in str(error):  # It is shorter.
                    return False
                raise
        return bytes(found.value) == start

    def write(self, path: str, value: bytes) -> None:
        """Set the value at a path, whole or not at all."""
        with told_apart(f"writing {path}"):
            self._kv.write(path, value).result()

    def delete(self, path: str) -> None:
        """Delete the value at a path."""
        with told_apart(f"deleting {path}"):
            self._kv.write(path, None).result()

    # Folders

    def check_inside(self, folder: str) -> None:
        """Raise `InvalidOption` if a symbolic link leads a folder out of the root."""
        if self.directory is not None and not (self.directory / folder).resolve().is_relative_to(
            self.directory.resolve()
        ):
            raise InvalidOption(f"{folder} leaves the root through a symbolic link; remove that link")

    def make_folder(self, folder: str) -> None:
        """Make a folder and what lies above it, so that a crash of the machine cannot undo it later."""
        if self.directory is None:
            return
        self.check_inside(folder)
        with told_apart(f"making {folder}"), self._directories:
            for attempt in range(_ATTEMPTS):
                try:
                    _make_durably(self.directory / folder)
                except FileNotFoundError:
                    # Another process has removed an empty folder above it meanwhile.
                    if attempt == _ATTEMPTS - 1:
                        raise
                else:
                    return

    def remove_folder(self, folder: str) -> None:
        """Remove a folder with all that is in it, and on a file system the empty folders above it."""
        self.check_inside(folder)
        if self.directory is None:
            with told_apart(f"removing {folder}"):
                self._kv.write(f"{folder}manifest.ocdbt", None).result()
                self._kv.delete_range(ts.KvStore.KeyRange(folder, _after(folder))).result()
            return
        trash = self.directory / _TRASH / secrets.token_hex(8)
        with told_apart(f"removing {folder}"), self._directories:
            # In one step, so that a crash leaves a folder whole or gone; what tensorstore hides, its lock files, goes too.
            with contextlib.suppress(FileNotFoundError):
                (self.directory / folder).rename(trash)
            self._remove_empty_above(self.directory / folder)
        shutil.rmtree(trash, ignore_errors=True)

    def empty_trash(self) -> None:
        """Finish the removals that a crash has cut off."""
        if self.directory is not None:
            for left in (self.directory / _TRASH).iterdir():
                shutil.rmtree(left, ignore_errors=True)

    def _remove_empty_above(self, folder: Path) -> None:
        for above in folder.parents:
            if above == self.directory or not _remove_empty(above):
                return

    def names(self, folder: str, mark: str) -> Iterator[str]:
        """The names of the folders in a folder that start with ``mark``."""
        if self.directory is not None:
            try:
                with os.scandir(self.directory / folder) as found:
                    yield from [one.name for one in found if one.name.startswith(mark) and one.is_dir()]
            except OSError as error:
                _unless_gone(error)
            return
        start = folder + mark
        with told_apart(f"listing {folder}"):
            listing = self._kv.list(ts.KvStore.KeyRange(start, _after(start))).result()
        paths = (path.decode()[len(folder) :] for path in listing)
        yield from dict.fromkeys(name for name, slash, _ in (path.partition("/") for path in paths) if slash)

    def folders(self, below: str, mark: str) -> Iterator[str]:
        """The folders ``below`` a folder, at any depth, whose own name starts with ``mark``; nothing within them.

        On a file system, folders that hold nothing are removed on the way.
        """
        if self.directory is None:
            with told_apart(f"listing {below}"):
                listing = self._kv.list(ts.KvStore.KeyRange(below, _after(below))).result()
            paths = (path.decode() for path in listing)
            yield from dict.fromkeys(found for path in paths if (found := _marked(path, mark)))
            return
        for folder, names, files in os.walk(self.directory / below, onerror=_unless_gone):
            for name in [name for name in names if name.startswith(mark)]:
                names.remove(name)
                yield f"{folder.removeprefix(str(self.directory)).lstrip('/')}/{name}/"
            if not names and not files and _remove_empty(Path(folder)):
                self._remove_empty_above(Path(folder))


def _meant(url: str) -> str:
    """What somebody who wrote this may have meant."""
    if url.startswith(("/", ".", "~")):
        return f"; a directory is {Path(url).expanduser().absolute().as_uri()}"
    return f"; a server is http://{url}" if re.fullmatch(r"[\w.-]+:\d+", url) else ""


def _unless_gone(error: OSError) -> None:
    """A folder that cannot be listed must not pass for an empty one."""
    if not isinstance(error, FileNotFoundError | NotADirectoryError):
        raise InternalError(f"listing the root: the storage failed: {error.strerror}") from error


def _marked(path: str, mark: str) -> str | None:
    parts = path.split("/")
    for depth, part in enumerate(parts[:-1]):
        if part.startswith(mark):
            return "/".join(parts[: depth + 1]) + "/"
    return None


def _after(folder: str) -> str:
    return folder[:-1] + chr(ord(folder[-1]) + 1)


def _remove_empty(folder: Path) -> bool:
    try:
        folder.rmdir()
    except OSError:
        return False
    return True


def _make_durably(folder: Path) -> None:
    missing = [folder]
    while not missing[-1].parent.exists():
        missing.append(missing[-1].parent)
    for one in reversed(missing):
        one.mkdir(exist_ok=True)
        descriptor = os.open(one.parent, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
