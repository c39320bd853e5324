"""The stopwatch: how long the steps of each way took, round after round."""

from __future__ import annotations

import contextlib
import statistics
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Self

__all__ = ["Stopwatch", "Times"]


@dataclass(frozen=True)
class Times:
    """Median and quartiles of the durations of one step, in seconds, and how many there were."""

    median: float
    lower: float
    upper: float
    count: int

    @classmethod
    def of(cls, seconds: list[float]) -> Self:
        """Of one duration or more.

        >>> Times.of([3.0, 1.0, 2.0])
        Times(median=2.0, lower=1.5, upper=2.5, count=3)
        """
        if len(seconds) == 1:
            return cls(seconds[0], seconds[0], seconds[0], 1)
        lower, median, upper = statistics.quantiles(seconds, n=4, method="inclusive")
        return cls(median, lower, upper, len(seconds))

    @property
    def spread(self) -> float:
        """The distance of the quartiles as a share of the median."""
        return (self.upper - self.lower) / self.median


class Stopwatch:
    """Takes the durations of named steps.

    >>> watch = Stopwatch()
    >>> with watch.step("put"):
    ...     pass
    >>> watch.times["put"].count
    1
    """

    def __init__(self) -> None:
        self._seconds: defaultdict[str, list[float]] = defaultdict(list)
        self._is_stopped = False

    @contextlib.contextmanager
    def step(self, name: str) -> Iterator[None]:
        """Take the duration of what stands in the with statement; nothing, if it raises."""
        started = time.perf_counter()
        yield
        if not self._is_stopped:
            self._seconds[name].append(time.perf_counter() - started)

    @contextlib.contextmanager
    def stopped(self) -> Iterator[None]:
        """Take no duration for as long as this lasts."""
        self._is_stopped = True
        try:
            yield
        finally:
            self._is_stopped = False

    def reset(self) -> None:
        """Forget all durations, as after the warm-up."""
        self._seconds.clear()

    @property
    def times(self) -> dict[str, Times]:
        """Step -> its durations."""
        return {name: Times.of(seconds) for name, seconds in self._seconds.items()}
