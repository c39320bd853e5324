"""Transports: the store itself, put and got as a caller does it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt

from residual_client.bench.limits import forget_pages
from residual_client.bench.stopwatch import Stopwatch
from residual_client.bench.workload import Workload
from residual_store.bundle import Bundle
from residual_store.errors import InvalidOption
from residual_store.store import Durability, Receipt, Store

__all__ = ["Durable", "Transport", "arrays_of"]


class Transport:
    """A store in memory: steps ``put`` (digests included) and ``get`` (each leaf a host array)."""

    durability: Durability = "host"

    def __init__(self, name: str, store: Store, *, run: str) -> None:
        self.name = name
        self.store = store
        self._key = f"{run}/{name}"

    def round(self, workload: Workload, watch: Stopwatch) -> None:
        with watch.step("put"):
            self.put(workload)
        try:
            self._gets(watch)
        finally:
            self.store.delete(self._key)

    def put(self, workload: Workload) -> Receipt:
        """Build a bundle of the arrays and store it."""
        return self.store.put(self._key, Bundle.of_arrays(workload.arrays), durability=self.durability)

    def _gets(self, watch: Stopwatch) -> None:
        with watch.step("get"):
            leaves = arrays_of(self.store.get(self._key))
        del leaves


class Durable(Transport):
    """A store on disk: ``get`` finds no page of the bundle in the kernel's cache, ``get_warm`` finds all."""

    durability: Durability = "disk"

    def __init__(self, name: str, store: Store, *, run: str, root: Path) -> None:
        super().__init__(name, store, run=run)
        self._root = root

    def _gets(self, watch: Stopwatch) -> None:
        if (tier := self.store.stat(self._key).tier) != "durable":
            raise InvalidOption(f"the bundle is in the {tier} tier, so a get would not read from the disk")
        for path in self._root.rglob("*"):
            if path.is_file():
                forget_pages(path)
        super()._gets(watch)
        with watch.step("get_warm"):
            leaves = arrays_of(self.store.get(self._key))
        del leaves


def arrays_of(bundle: Bundle) -> list[npt.NDArray[np.generic]]:
    """All leaves of a bundle as host arrays."""
    return [bundle.array(index) for index in range(len(bundle.manifest.leaves))]
