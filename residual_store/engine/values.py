"""Values: what a database holds, by key, out of any key-value store and, faster, straight out of files."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import tensorstore as ts

from residual_store.bundle import Payload
from residual_store.closing import ClosedAtExit
from residual_store.engine.dump import dump

__all__ = ["FileValues", "Seen", "StoreValues", "Values"]

_PART = 1 << 20

type Seen = Callable[[Payload], object]


class Values(Protocol):
    """The values of one OCDBT database; what is not there or cannot be read raises ValueError or OSError."""

    def get(self, key: str) -> bytes | None:
        """A small value, or None if there is none."""

    def begin(self, key: str, memory: Payload, *, nbytes: int) -> Callable[[Seen], None]:
        """Begin to read the start of a value of ``nbytes`` bytes into ``memory``.

        The result waits for the end, and shows the bytes in order while they are in cache.
        """

    def close(self) -> None:
        """Release what is held."""


class StoreValues(ClosedAtExit):
    """The values of the database ``spec`` in any key-value store of tensorstore."""

    def __init__(self, spec: dict[str, Any], *, context: ts.Context) -> None:
        self._database = ts.KvStore.open(spec, context=context).result()

    def close(self) -> None:
        """There is nothing to release."""

    def get(self, key: str) -> bytes | None:
        found = self._database.read(key).result()
        return bytes(found.value) if found.state == "value" else None

    def begin(self, key: str, memory: Payload, *, nbytes: int) -> Callable[[Seen], None]:
        return partial(_take, self._database.read(key), memory, nbytes)


def _take(reading: Any, memory: Payload, nbytes: int, seen: Seen) -> None:
    value = reading.result().value
    if len(value) != nbytes:
        raise ValueError(f"a value has {len(value)} bytes, not {nbytes}")
    memory[:] = np.frombuffer(value, np.uint8, len(memory))
    seen(memory)


@dataclass(frozen=True)
class _Extent:
    path: str
    offset: int
    nbytes: int


class FileValues(ClosedAtExit):
    """The values of the database in ``directory``, read from where they lie in its data files without a copy between.

    Its tree is read by `residual_store.engine.dump.dump`.
    A file stays open, because the kernel sees only through one descriptor that it is read in order:
    opened anew for each 8 MiB, a file was read at two thirds of the speed.
    """

    def __init__(self, directory: Path, *, context: ts.Context) -> None:
        self._directory = directory
        self._context = context
        self._descriptors: dict[str, int] = {}
        self._opening = threading.Lock()
        self._found: dict[str, bytes | _Extent] = {}
        if (directory / "manifest.ocdbt").exists():
            self._base = ts.KvStore.open(
                {"driver": "file", "path": f"{directory}/"}, context=context
            ).result()
            self._walk(self._dump(None)["versions"][-1]["root"], b"")

    def close(self) -> None:
        while self._descriptors:
            os.close(self._descriptors.popitem()[1])

    def _dump(self, node: str | None) -> Any:
        return dump(self._base, node, context=self._context)

    def _walk(self, parent: dict[str, Any], prefix: bytes) -> None:
        """Note the values below a node of the tree; keys below it are written without the prefix that they share."""
        if "location" not in parent:
            return
        for entry in self._dump(parent["location"])["entries"]:
            key = prefix + entry["key"]
            if "location" in entry:
                self._walk(entry, prefix + entry["subtree_common_prefix"])
            elif "inline_value" in entry:
                self._found[key.decode()] = entry["inline_value"]
            else:
                _, folder, place = entry["indirect_value"].split(":", 2)
                name, offset, nbytes = place.rsplit(":", 2)
                path = f"{self._directory}/{folder}{name}"
                self._found[key.decode()] = _Extent(path, int(offset), int(nbytes))

    def get(self, key: str) -> bytes | None:
        found = self._found.get(key)
        if not isinstance(found, _Extent):
            return found
        value = np.empty(found.nbytes, np.uint8)
        self._read(found, value, len)
        return value.tobytes()

    def begin(self, key: str, memory: Payload, *, nbytes: int) -> Callable[[Seen], None]:
        found = self._found.get(key, b"")
        length = found.nbytes if isinstance(found, _Extent) else len(found)
        if length != nbytes:
            raise ValueError(f"{key} has {length} bytes, not {nbytes}")
        if isinstance(found, _Extent):
            return partial(self._read, found, memory)
        memory[:] = np.frombuffer(found, np.uint8, len(memory))
        return partial(_show, memory)

    def _read(self, extent: _Extent, memory: Payload, seen: Seen) -> None:
        descriptor = self._open(extent.path)
        for start in range(0, len(memory), _PART):
            part = memory[start : start + _PART]
            _fill(part, descriptor, extent.offset + start)
            seen(part)

    def _open(self, path: str) -> int:
        with self._opening:
            if path not in self._descriptors:
                self._descriptors[path] = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            return self._descriptors[path]


def _show(memory: Payload, seen: Seen) -> None:
    seen(memory)


def _fill(memory: Payload, descriptor: int, offset: int) -> None:
    while len(memory):
        count = os.preadv(descriptor, [memory], offset)
        if not count:
            raise ValueError("a file ends before a value in it does")
        memory, offset = memory[count:], offset + count
