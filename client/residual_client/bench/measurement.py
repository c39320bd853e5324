"""The measurement: rounds in which every way takes its turn."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from residual_client.bench.stopwatch import Stopwatch, Times
from residual_client.bench.way import Way
from residual_client.bench.workload import Workload

__all__ = ["Measured", "Pace", "measure"]

type Measured = Mapping[str, Mapping[str, Times]]
"""Way -> step -> its durations."""


@dataclass(frozen=True, kw_only=True)
class Pace:
    """How many rounds warm up, and when to stop: after so many rounds, or after so many seconds and at least a few rounds."""

    warm_up: int
    rounds: int
    seconds: float
    fewest: int = 5


def measure(workload: Workload, ways: Sequence[Way], pace: Pace) -> list[Mapping[str, Times]]:
    """The times of the steps of each way. They take turns, so that whatever the machine does besides meets them all."""
    watches = [Stopwatch() for _ in ways]
    # What is there already need not be searched for garbage while the watch runs.
    gc.collect()
    gc.freeze()
    try:
        for _ in range(pace.warm_up):
            _round(workload, ways, watches)
        for watch in watches:
            watch.reset()
        deadline = time.monotonic() + pace.seconds
        for number in range(pace.rounds):
            if number >= pace.fewest and time.monotonic() > deadline:
                break
            _round(workload, ways, watches)
    finally:
        gc.unfreeze()
    return [watch.times for watch in watches]


def _round(workload: Workload, ways: Iterable[Way], watches: Iterable[Stopwatch]) -> None:
    for way, watch in zip(ways, watches, strict=True):
        way.round(workload, watch)
