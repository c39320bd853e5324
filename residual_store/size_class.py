"""Size classes: blocks come in few lengths, so that one that comes back fits what is asked for next."""

from __future__ import annotations

import mmap

__all__ = ["largest_for", "size_class"]

_CLASSES_PER_DOUBLING = 32
_SPARE_CLASSES = 4


def size_class(nbytes: int) -> int:
    """The length of the blocks for ``nbytes``: at most a 32nd more, in whole pages.

    >>> size_class(128 << 20) >> 20, size_class(100_000)
    (128, 102400)
    """
    step = max((1 << nbytes.bit_length() - 1) // _CLASSES_PER_DOUBLING, mmap.PAGESIZE)
    return -(-nbytes // step) * step


def largest_for(nbytes: int) -> int:
    """The length of the longest block that is not too long for ``nbytes``: an eighth more.

    >>> largest_for(128 << 20) >> 20
    144
    """
    return nbytes + _SPARE_CLASSES * nbytes // _CLASSES_PER_DOUBLING
