"""Refusals: an error about a leaf also says in which bundle."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from residual_store.errors import GradientRefused

__all__ = ["about"]


@contextlib.contextmanager
def about(key: str) -> Iterator[None]:
    """Add the key of a bundle to the refusals that are raised within.

    >>> with about("exp1/step-1"):
    ...     pass
    """
    try:
        yield
    except GradientRefused as error:
        raise type(error)(f"{key!r}: {error.detail}", **{**error.fields, "key": key}) from error.__cause__
