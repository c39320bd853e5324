"""Refusals: an error about a leaf also says in which bundle."""

from __future__ import annotations

from functools import partial

from residual_store.errors import GradientRefused
from residual_store.translation import Translation

__all__ = ["about"]


def about(key: str) -> Translation:
    """Add the key of a bundle to the refusals that are raised within.

    >>> with about("exp1/step-1"):
    ...     pass
    """
    return Translation(partial(_translate, key))


def _translate(key: str, error: Exception) -> None:
    if isinstance(error, GradientRefused):
        raise error.retold(f"{key!r}: {error.detail}", key=key) from error.__cause__
