"""Turns: of several uploads that bring the same large leaf, one brings it and the others wait."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Collection, Hashable, Iterator

__all__ = ["Turns"]


class Turns:
    """What is on its way just now, by name.

    >>> turns = Turns()
    >>> with turns.taken({"a", "b"}) as end:
    ...     end({"a"})
    ...     with turns.taken({"a"}):
    ...         pass
    """

    def __init__(self) -> None:
        self._under_way: set[Hashable] = set()
        self._changed = threading.Condition()

    @contextlib.contextmanager
    def taken(self, names: Collection[Hashable]) -> Iterator[Callable[[Collection[Hashable]], None]]:
        """Wait until nobody else brings any of these, and bring them; all at once, so that two never wait for each other.

        What is yielded ends the turn of some of them before the block ends: they are there, or will not come.
        """
        left = set(names)
        with self._changed:
            self._changed.wait_for(lambda: self._under_way.isdisjoint(left))
            self._under_way |= left

        def end(some: Collection[Hashable]) -> None:
            with self._changed:
                self._under_way.difference_update(left.intersection(some))
                left.difference_update(some)
                self._changed.notify_all()

        try:
            yield end
        finally:
            end(set(left))
