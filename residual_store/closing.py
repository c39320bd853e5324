"""Closing: what holds something is closed at the end of a with statement."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Self

__all__ = ["ClosedAtExit"]


class ClosedAtExit(ABC):
    """A base for classes with a ``close`` method that can stand in a with statement."""

    @abstractmethod
    def close(self) -> None:
        """Release what is held; once is enough, and more often does no harm."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object, /) -> None:
        if error is None:
            self.close()
            return
        try:
            self.close()
        except Exception as another:  # noqa: BLE001 - what ended the with statement must not be hidden by it
            error.add_note(f"closing failed as well: {type(another).__name__}: {another}")
