"""The client's way: a VJP object offloaded and restored."""

from __future__ import annotations

import jax

from residual_client.bench.stopwatch import Stopwatch
from residual_client.bench.workload import Workload
from residual_client.client import Client
from residual_store.store import Store

__all__ = ["ThroughClient"]


class ThroughClient:
    """`Client.offload` and `Client.restore` over one transport: ``put``, and ``get`` with all arrays ready on the device."""

    def __init__(self, name: str, store: Store, *, run: str) -> None:
        self.name = name
        self._client = Client(store)
        self._key = f"{run}/{name}-client"

    def round(self, workload: Workload, watch: Stopwatch) -> None:
        with watch.step("put"):
            handle = self._client.offload(workload.vjp, self._key, durability="host")
            handle.wait()
        try:
            with watch.step("get"):
                vjp = jax.block_until_ready(self._client.restore(handle))
            del vjp
        finally:
            self._client.delete(handle)
