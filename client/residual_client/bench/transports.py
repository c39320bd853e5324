"""Transports: the store itself, put and got as a caller does it."""

from __future__ import annotations

from pathlib import Path

from residual_client.bench.limits import forget_pages
from residual_client.bench.stopwatch import Stopwatch
from residual_client.bench.way import Exchange
from residual_client.bench.workload import Host, Workload
from residual_store.bundle import Bundle
from residual_store.errors import InvalidOption
from residual_store.store import Durability, Receipt, Store

__all__ = ["Durable", "Served", "Transport", "detour"]


class Transport(Exchange):
    """A store in memory: a put takes digests and builds the bundle, and a get has a view or an array of each leaf."""

    durability: Durability = "host"

    def __init__(self, name: str, store: Store, *, run: str) -> None:
        self.name = name
        self.store = store
        self.key = f"{run}/{name}"

    def put(self, workload: Workload) -> None:
        self._store(workload)

    def _store(self, workload: Workload) -> Receipt:
        return self.store.put(self.key, Bundle.of_arrays(workload.arrays), durability=self.durability)

    def get(self, workload: Workload) -> list[Host]:
        bundle = self.store.get(self.key)
        return [bundle.array(index) for index in range(len(workload.arrays))]

    def drop(self, workload: Workload) -> None:
        self.store.delete(self.key)


class Served(Transport):
    """A server, over the transport of this name: a put whose receipt names another one is a detour."""

    def __init__(self, name: str, store: Store, *, run: str) -> None:
        super().__init__(name, store, run=run)
        self.detours: dict[str, str] = {}

    def put(self, workload: Workload) -> None:
        self.detours |= detour(self.name, workload, self._store(workload))


def detour(transport: str, workload: Workload, receipt: Receipt) -> dict[str, str]:
    """Workload -> why it was not moved over that transport; empty if it was."""
    taken, why = receipt.transport, receipt.transport_note
    return {} if taken == transport else {workload.name: why or f"the receipt says {taken}"}


class Durable(Transport):
    """A store on disk: ``get`` finds no page of the bundle in the kernel's cache, ``get_warm`` finds all."""

    durability: Durability = "disk"

    def __init__(self, name: str, store: Store, *, run: str, root: Path) -> None:
        super().__init__(name, store, run=run)
        self._root = root

    def timed_get(self, step: str, workload: Workload, watch: Stopwatch, *, check: bool) -> None:
        """Both gets; raises `InvalidOption` if the bundle is in memory, where a get would not read from the disk."""
        if (tier := self.store.stat(self.key).tier) != "durable":
            raise InvalidOption(f"the bundle is in the {tier} tier, so a get would not read from the disk")
        for path in self._root.rglob("*"):
            if path.is_file():
                forget_pages(path)
        super().timed_get(step, workload, watch, check=check)
        super().timed_get(f"{step}_warm", workload, watch, check=check)
