"""A way: one thing that is measured with every workload."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, Protocol

from residual_client.bench.stopwatch import Stopwatch
from residual_client.bench.workload import Host, Workload

__all__ = ["Exchange", "Way"]


class Way(Protocol):
    """A limit, a transport or a peer; ``name`` is that of the JSON."""

    @property
    def name(self) -> str: ...

    def round(self, workload: Workload, watch: Stopwatch) -> None:
        """Move the arrays of the workload once, take the time of each step, and leave nothing behind."""


class Exchange(ABC):
    """A way that puts arrays and gets them back: steps ``put`` and ``get``.

    The arrays may come back with another dtype of the same bits.
    ``detours`` says which workloads were moved in another way than the name says, and why.
    """

    name: str
    detours: Mapping[str, str] = {}

    @abstractmethod
    def put(self, workload: Workload) -> None:
        """Put the arrays; on return they are wherever this way promises them to be."""

    @abstractmethod
    def get(self, workload: Workload) -> Any:
        """What was put: a list of host arrays in the order of the workload, or what `hosts` makes that of."""

    @abstractmethod
    def drop(self, workload: Workload) -> None:
        """Delete what was put; nothing that `get` gave is alive any more."""

    def hosts(self, got: Any) -> list[Host]:
        """The arrays of what `get` gave; that is not timed."""
        hosts: list[Host] = got
        return hosts

    def round(self, workload: Workload, watch: Stopwatch) -> None:
        """Put, get, drop; what the first get gives is compared with what was put."""
        is_first = not watch.times
        with watch.step("put"):
            self.put(workload)
        try:
            self.timed_get("get", workload, watch, check=is_first)
        finally:
            self.drop(workload)

    def timed_get(self, step: str, workload: Workload, watch: Stopwatch, *, check: bool) -> None:
        """One get, whose arrays are dropped; raises `DataLoss` if they are to be compared and differ."""
        with watch.step(step):
            got = self.get(workload)
        if check:
            workload.check(self.hosts(got))
