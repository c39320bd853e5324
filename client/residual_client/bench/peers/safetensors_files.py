"""safetensors: one file for all leaves, in memory (tmpfs) where there is such a file system."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from residual_client.bench.way import Exchange
from residual_client.bench.workload import Host, Workload

__all__ = ["safetensors_files"]

_SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - in a private folder
_ROOM_BYTES = 1 << 30


@contextlib.contextmanager
def safetensors_files(folder: Path) -> Iterator[Exchange]:
    """Files in a folder of shared memory, or in ``folder`` if there is no room in it."""
    from safetensors import numpy as library

    with tempfile.TemporaryDirectory(prefix="residual-store-bench-", dir=_place(folder)) as own:
        yield _Safetensors(Path(own) / "leaves.safetensors", library.save_file, library.load_file)


def _place(folder: Path) -> Path:
    """A container may have little shared memory, or none."""
    if not os.access(_SHARED_MEMORY, os.W_OK) or shutil.disk_usage(_SHARED_MEMORY).free < _ROOM_BYTES:
        return folder
    return _SHARED_MEMORY


class _Safetensors(Exchange):
    """``save_file`` and ``load_file``, which give arrays of their own."""

    name = "safetensors"

    def __init__(self, path: Path, save: Callable[..., Any], load: Callable[..., Any]) -> None:
        self._path = path
        self._save = save
        self._load = load

    def put(self, workload: Workload) -> None:
        self._save(dict(workload.arrays), self._path)

    def get(self, workload: Workload) -> list[Host]:
        arrays = self._load(self._path)
        return [arrays[name] for name in workload.arrays]

    def drop(self, workload: Workload) -> None:
        self._path.unlink()
