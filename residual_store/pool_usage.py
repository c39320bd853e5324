"""The usage of a pool of segments."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["PoolUsage"]


@dataclass(frozen=True)
class PoolUsage:
    """``held`` bytes have a view somewhere, ``idle`` bytes wait to be used again.

    ``fresh`` and ``recycled`` count the segments that were handed out, by whether their memory was new.

    >>> PoolUsage().plus(held=4096, fresh=1).plus(held=-4096, idle=4096)
    PoolUsage(held=0, idle=4096, fresh=1, recycled=0)
    """

    held: int = 0
    idle: int = 0
    fresh: int = 0
    recycled: int = 0

    def plus(self, *, held: int = 0, idle: int = 0, fresh: int = 0, recycled: int = 0) -> PoolUsage:
        """The usage after a change."""
        return PoolUsage(self.held + held, self.idle + idle, self.fresh + fresh, self.recycled + recycled)
