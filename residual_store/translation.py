"""Translation: an error of one layer becomes one of the next."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from types import TracebackType

__all__ = ["Translation"]


class Translation(contextlib.AbstractContextManager[None]):
    """A context that gives each error within to ``translate``, which raises another one, or returns to let it pass.

    A generator under `contextlib.contextmanager` that raises another error makes a cycle: the first error refers to the
    frame of the generator, this one to that of ``__exit__``, and that to the error.
    All that the callers hold, here the memory of a bundle, would stay until the garbage collector runs.

    >>> def translate(error: Exception) -> None:
    ...     raise RuntimeError("reading the index") from error
    >>> with Translation(translate):
    ...     raise OSError
    Traceback (most recent call last):
    RuntimeError: reading the index
    """

    def __init__(self, translate: Callable[[Exception], None]) -> None:
        self._translate = translate

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if isinstance(error, Exception):
            self._translate(error)
