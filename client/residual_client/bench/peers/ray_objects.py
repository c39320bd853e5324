"""Ray's object store: shared memory on one host, put and got with ``ray.put`` and ``ray.get``."""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from residual_client.bench.way import Exchange
from residual_client.bench.workload import Host, Workload

__all__ = ["ray_objects"]

_STORE_BYTES = 1 << 30


@contextlib.contextmanager
def ray_objects(folder: Path) -> Iterator[Exchange]:
    """A Ray cluster of one node, whose store is small enough that the warm-up has touched all its pages."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    import ray

    with warnings.catch_warnings():
        # It forks to start programs of its own, which never call JAX.
        warnings.filterwarnings("ignore", "os.fork", RuntimeWarning)
        ray.init(
            num_cpus=1,
            object_store_memory=_STORE_BYTES,
            include_dashboard=False,
            log_to_driver=False,
            logging_level="error",
            _temp_dir=str(folder / "ray"),
        )
    try:
        yield _Ray(ray)
    finally:
        ray.shutdown()


class _Ray(Exchange):
    """One object, a list of the leaves as bytes: arrays of bfloat16 would be pickled and copied."""

    name = "ray"

    def __init__(self, ray: Any) -> None:
        self._ray = ray
        self._held: list[Any] = []

    def put(self, workload: Workload) -> None:
        leaves = [array.reshape(-1).view(np.uint8) for array in workload.arrays.values()]
        self._held.append(self._ray.put(leaves))

    def get(self, workload: Workload) -> list[Host]:
        leaves: list[Host] = self._ray.get(self._held[0])
        return leaves

    def drop(self, workload: Workload) -> None:
        self._held.clear()
