"""The high water: the most that was in use lately, which bounds what a pool keeps."""

from __future__ import annotations

from collections.abc import Callable

__all__ = ["HighWater"]

_ALWAYS = 64 << 20


class HighWater:
    """The most bytes that were in use in the last one to two periods of ``seconds``.

    >>> water = HighWater(seconds=5.0, clock=lambda: 0.0)
    >>> water.note(800 << 20)
    >>> water.note(3)
    >>> water.worth_keeping >> 20
    1200
    """

    def __init__(self, *, seconds: float, clock: Callable[[], float]) -> None:
        self._seconds = seconds
        self._clock = clock
        self._since = clock()
        self._before = self._now = 0

    @property
    def worth_keeping(self) -> int:
        """Half as much again: enough for a program that does the same again, while sizes that never come back add up to little."""
        return max(max(self._before, self._now) * 3 // 2, _ALWAYS)

    def note(self, nbytes: int) -> None:
        """So many bytes are in use from now on."""
        age = self._clock() - self._since
        if age > self._seconds:
            self._before = self._now if age <= 2 * self._seconds else nbytes
            self._now, self._since = nbytes, self._clock()
        self._now = max(self._now, nbytes)
