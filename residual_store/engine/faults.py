"""Faults of the storage below, told apart: what tensorstore raises becomes an error of this project."""

from __future__ import annotations

import errno
import os
from functools import partial

from residual_store.errors import InternalError, ResidualStoreError, StoreFull
from residual_store.translation import Translation

__all__ = ["check_is_damage", "is_damage", "told_apart"]

_NOT_DAMAGE = (
    "permission_denied",
    "unavailable",
    "resource_exhausted",
    "deadline_exceeded",
    "unauthenticated",
    "cancelled",
    "aborted",
    "too many open files",
    "permission denied",
    "input/output error",
)
_FULL = ("no space left", "resource_exhausted", "quota")


def is_damage(error: Exception) -> bool:
    """Whether an error of tensorstore says that the stored bytes are wrong, and not that they cannot be reached now."""
    text = str(error).lower()
    return not any(word in text for word in _NOT_DAMAGE)


def check_is_damage(error: Exception, what: str) -> None:
    """Raise `InternalError` for an error of the storage that says nothing about the stored bytes."""
    if not is_damage(error):
        raise InternalError(f"{what}: the storage failed, and may be read later") from error


def told_apart(what: str) -> Translation:
    """Turn an error of tensorstore or the file system into `StoreFull` or `InternalError` that says ``what`` failed.

    tensorstore raises ValueError for nearly everything, with a status code in the text.
    That text may hold paths of the server, so it stays in the cause and out of the message.

    >>> with told_apart("reading the index"):
    ...     pass
    """
    return Translation(partial(_translate, what))


def _translate(what: str, error: Exception) -> None:
    if isinstance(error, ResidualStoreError) or not isinstance(error, ValueError | OSError):
        return
    if isinstance(error, OSError) and error.errno is not None:
        is_full, reason = error.errno in (errno.ENOSPC, errno.EDQUOT), f": {os.strerror(error.errno)}"
    else:
        is_full, reason = any(word in str(error).lower() for word in _FULL), ""
    if is_full:
        raise StoreFull(f"{what}: there is no room on the disk") from error
    raise InternalError(f"{what}: the storage failed{reason}") from error
