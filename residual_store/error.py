"""The root of the error tree: what every error of Residual Store says, to people and to machines."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

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
