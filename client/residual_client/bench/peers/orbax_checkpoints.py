"""Orbax: a checkpoint of all leaves on disk."""

from __future__ import annotations

import contextlib
import logging
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from residual_client.bench.way import Exchange
from residual_client.bench.workload import Host, Workload

__all__ = ["orbax_checkpoints"]


@contextlib.contextmanager
def orbax_checkpoints(folder: Path) -> Iterator[Exchange]:
    """Checkpoints below ``folder``, each in a directory of its own."""
    from orbax import checkpoint

    logging.getLogger("absl").setLevel(logging.ERROR)
    with checkpoint.Checkpointer(checkpoint.PyTreeCheckpointHandler()) as checkpointer:
        yield _Orbax(checkpointer, folder / "checkpoint")


class _Orbax(Exchange):
    """``save`` and ``restore`` of a dictionary of numpy arrays; a save ends when the checkpoint has its final name."""

    name = "orbax"

    def __init__(self, checkpointer: Any, path: Path) -> None:
        self._checkpointer = checkpointer
        self._path = path

    def put(self, workload: Workload) -> None:
        self._checkpointer.save(self._path, dict(workload.arrays))

    def get(self, workload: Workload) -> list[Host]:
        arrays = self._checkpointer.restore(self._path)
        return [arrays[name] for name in workload.arrays]

    def drop(self, workload: Workload) -> None:
        shutil.rmtree(self._path)
