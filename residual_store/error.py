"""The root of the error tree: what every error of Residual Store says, to people and to machines."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Self

__all__ = ["Field", "ResidualStoreError"]

type Field = str | int | float | bool | None


class ResidualStoreError(Exception):
    """The root of all errors of this project.

    The text says what was refused, where, why and what to do next, and ``fields`` the same for machines, by name.

    >>> ResidualStoreError("there is no bundle 'exp1/step-1'", key="exp1/step-1").fields["key"]
    'exp1/step-1'
    """

    code: ClassVar[str] = "error"
    status: ClassVar[int | None] = None

    def __init__(self, detail: str, /, **fields: Field) -> None:
        super().__init__(detail)
        self.detail = detail
        self.fields: Mapping[str, Field] = fields

    def retold(self, detail: str, **fields: Field) -> Self:
        """The same error anew, in other words and with more ``fields``; it has the same notes.

        >>> ResidualStoreError("there is no room", free_bytes=0).retold("'run/a': there is no room", key="run/a").fields
        {'free_bytes': 0, 'key': 'run/a'}
        """
        told = type(self)(detail, **{**self.fields, **fields})
        for note in getattr(self, "__notes__", ()):
            told.add_note(note)
        return told
