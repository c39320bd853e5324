"""The figures: what was measured, and its JSON form."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from residual_client.bench.measurement import Measured
from residual_client.bench.stopwatch import Times

__all__ = ["LIMIT_OF", "Figures", "WorkloadFigures"]

LIMIT_OF: Mapping[str, Mapping[str, str]] = {
    "embedded": {"put": "memcpy", "get": "memcpy"},
    "segment": {"put": "memcpy", "get": "memcpy"},
    "http": {"put": "socket_send", "get": "socket_receive"},
    "durable": {"put": "write_fsync", "get": "read_uncached", "get_warm": "read_cached"},
}
"""Transport -> step -> the limit that bounds it."""


@dataclass(frozen=True, kw_only=True)
class WorkloadFigures:
    """All that was measured with one workload of so many bytes and leaves.

    ``left_out`` says which transports did not move it, and why.
    """

    name: str
    nbytes: int
    leaves: int
    limits: Measured
    transports: Measured
    client: Measured
    peers: Measured
    left_out: Mapping[str, str]

    @property
    def rounds(self) -> int:
        return self._limit_times["memcpy"].count

    @property
    def _limit_times(self) -> Mapping[str, Times]:
        return {step: times for steps in self.limits.values() for step, times in steps.items()}

    def gbps(self, times: Times) -> float:
        """The median rate in 10^9 bytes per second."""
        return self.nbytes / times.median / 1e9

    def limit_gbps(self, limit: str) -> float:
        """The median rate of a limit."""
        return self.gbps(self._limit_times[limit])

    def to_dict(self) -> dict[str, Any]:
        """The figures as in the JSON; the package's docstring has the keys."""
        return {
            **{name: getattr(self, name) for name in ("nbytes", "leaves", "rounds")},
            "left_out": dict(self.left_out),
            "limits": {
                limit: {"gbps": self.gbps(times), "spread": times.spread}
                for limit, times in self._limit_times.items()
            },
            "transports": {
                name: self._steps(steps) | self._of_limits(LIMIT_OF[name], steps)
                for name, steps in self.transports.items()
            },
            "peers": {name: self._steps(steps) for name, steps in self.peers.items()},
            "client": {
                name: self._steps(steps) | self._of_client(self.transports[name], steps)
                for name, steps in self.client.items()
            },
        }

    def _steps(self, steps: Mapping[str, Times]) -> dict[str, float]:
        found: dict[str, float] = {}
        for step, times in steps.items():
            found[f"{step}_gbps"] = self.gbps(times)
            found[f"{step}_ms"] = 1e3 * times.median
            found[f"{step}_spread"] = times.spread
        return found

    def _of_limits(self, limits: Mapping[str, str], steps: Mapping[str, Times]) -> dict[str, float]:
        return {
            f"{step}_of_limit": self.gbps(times) / self.limit_gbps(limits[step])
            for step, times in steps.items()
        }

    def _of_client(self, store: Mapping[str, Times], steps: Mapping[str, Times]) -> dict[str, float]:
        return {
            "offload_of_memcpy": self.gbps(steps["put"]) / self.limit_gbps("memcpy"),
            "offload_of_store": store["put"].median / steps["put"].median,
            "stored_of_store": store["put"].median / steps["stored"].median,
            "restore_of_memcpy": self.gbps(steps["get"]) / self.limit_gbps("memcpy"),
        }


@dataclass(frozen=True, kw_only=True)
class Figures:
    """All that the benchmark measured; ``left_out`` says what is missing and why."""

    workloads: Sequence[WorkloadFigures]
    left_out: Mapping[str, str]
    machine: Mapping[str, Any]
    quick: bool
    seconds: float

    def to_json(self) -> str:
        """The figures as JSON text; the package's docstring has the keys."""
        return json.dumps(
            {
                "workloads": {workload.name: workload.to_dict() for workload in self.workloads},
                "left_out": dict(self.left_out),
                "machine": dict(self.machine),
                "quick": self.quick,
                "seconds": self.seconds,
            },
            indent=2,
        )
