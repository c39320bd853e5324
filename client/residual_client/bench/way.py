"""A way: one thing that is measured with every workload."""

from __future__ import annotations

from typing import Protocol

from residual_client.bench.stopwatch import Stopwatch
from residual_client.bench.workload import Workload

__all__ = ["Way"]


class Way(Protocol):
    """A limit, a transport or a peer.

    ``name`` is that of the JSON.
    """

    @property
    def name(self) -> str: ...

    def round(self, workload: Workload, watch: Stopwatch) -> None:
        """Move the arrays of the workload once, take the time of each step, and leave nothing behind."""
