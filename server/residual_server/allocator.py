"""The allocator of the C library, told to keep less memory for itself."""

from __future__ import annotations

import ctypes

__all__ = ["limit_arenas"]

_M_ARENA_MAX = -8
_ARENAS = 2


def limit_arenas() -> None:
    """Let all threads share two arenas of glibc; does nothing where the C library is another one.

    Each arena keeps freed chunks of several MiB, and tensorstore decodes in many threads: with an arena for each of them
    a get of 1 GiB from disk took up to 130 MiB beside the bundle, with two it takes 42 (see mallopt(3)).
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_ARENA_MAX, _ARENAS)
