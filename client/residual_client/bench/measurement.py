"""The measurement: rounds in which every way takes its turn."""

from __future__ import annotations

import gc
import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from residual_client.bench.stopwatch import Stopwatch, Times
from residual_client.bench.way import Way
from residual_client.bench.workload import Workload

__all__ = ["Measured", "Pace", "measure"]

type Measured = Mapping[str, Mapping[str, Times]]
"""Way -> step -> its durations."""


@dataclass(frozen=True, kw_only=True)
class Pace:
    """How many rounds warm up, and when to stop: after so many rounds, or after so many seconds and at least a few rounds.

    In its ``turn`` a way goes once, which does not count, and then so many times in a row: what a caller who does one thing
    meets is a steady state, and not the caches, the busy disk and the idle processor that another way left behind.
    """

    warm_up: int
    rounds: int
    seconds: float
    fewest: int = 5
    turn: int = 1


def measure(workload: Workload, ways: Sequence[Way], pace: Pace) -> list[Mapping[str, Times]]:
    """The times of the steps of each way.

    They take turns, in another order in each round, so that whatever the machine does besides, and whatever one way
    leaves behind in its caches, meets them all.
    """
    course = _Course(workload, ways, pace.turn)
    # What is there already need not be searched for garbage while the watch runs.
    gc.collect()
    gc.freeze()
    try:
        for _ in range(pace.warm_up):
            course.round()
        course.forget()
        deadline = time.monotonic() + pace.seconds
        for number in range(pace.rounds):
            if number >= pace.fewest and time.monotonic() > deadline:
                break
            course.round()
    finally:
        gc.unfreeze()
    return [watch.times for watch in course.watches]


class _Course:
    def __init__(self, workload: Workload, ways: Sequence[Way], turn: int) -> None:
        self.watches = [Stopwatch() for _ in ways]
        self._workload = workload
        self._turn = turn
        self._turns = list(zip(ways, self.watches, strict=True))
        self._random = random.Random(0)  # noqa: S311 - an order, no secret

    def round(self) -> None:
        self._random.shuffle(self._turns)
        for way, watch in self._turns:
            with watch.stopped():
                way.round(self._workload, watch)
            for _ in range(self._turn):
                way.round(self._workload, watch)

    def forget(self) -> None:
        for watch in self.watches:
            watch.reset()
