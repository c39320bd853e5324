"""Turns: of several uploads that bring the same large leaf, one brings it and the others wait."""

from __future__ import annotations

import threading
from collections.abc import Collection, Hashable

__all__ = ["Turns"]


class Turns:
    """What is on its way just now, by name.

    >>> turns = Turns()
    >>> turns.begin(["a", "b"])
    >>> turns.end(["a"])
    >>> turns.begin(["a"])
    """

    def __init__(self) -> None:
        self._under_way: set[Hashable] = set()
        self._changed = threading.Condition()

    def begin(self, names: Collection[Hashable]) -> None:
        """Wait until nobody else brings any of these, and bring them; all at once, so that two never wait for each other."""
        with self._changed:
            self._changed.wait_for(lambda: self._under_way.isdisjoint(names))
            self._under_way.update(names)

    def end(self, names: Collection[Hashable]) -> None:
        """They are there, or will not come."""
        with self._changed:
            self._under_way.difference_update(names)
            self._changed.notify_all()
