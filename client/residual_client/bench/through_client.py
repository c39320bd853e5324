"""The client's way: a VJP object offloaded and restored."""

from __future__ import annotations

from typing import Any

import jax

from residual_client.bench.block import residual_arrays
from residual_client.bench.stopwatch import Stopwatch
from residual_client.bench.transports import detour
from residual_client.bench.way import Exchange
from residual_client.bench.workload import Host, Workload
from residual_client.client import Client
from residual_store.store import Store

__all__ = ["ThroughClient"]


class ThroughClient(Exchange):
    """`Client.offload` and `Client.restore` over one transport.

    A ``put`` ends when `offload` returns, and step ``stored``, which begins with it, when the store has acknowledged.
    A get ends with all arrays ready on the device.
    """

    def __init__(self, name: str, store: Store, *, run: str) -> None:
        self.name = name
        self._client = Client(store)
        self._key = f"{run}/{name}-client"
        self.detours: dict[str, str] = {}

    def round(self, workload: Workload, watch: Stopwatch) -> None:
        """Offload, wait, restore, delete."""
        is_first = not watch.times
        with watch.step("stored"):
            with watch.step("put"):
                self.put(workload)
            receipt = self._handle.wait()
        self.detours |= detour(self.name, workload, receipt)
        try:
            self.timed_get("get", workload, watch, check=is_first)
        finally:
            self.drop(workload)

    def put(self, workload: Workload) -> None:
        self._handle = self._client.offload(workload.vjp, self._key, durability="host")

    def get(self, workload: Workload) -> Any:
        return jax.block_until_ready(self._client.restore(self._handle))

    def hosts(self, got: Any) -> list[Host]:
        return residual_arrays(got)

    def drop(self, workload: Workload) -> None:
        self._client.delete(self._handle)
