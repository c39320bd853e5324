"""Retries: a request is sent again while that can help."""

from __future__ import annotations

import random
import time
from collections.abc import Callable

from residual_store.errors import Busy, NotFound, Stopping, Unreachable, UploadStalled
from residual_store.settings import Settings

__all__ = ["repeated"]


def repeated[T](once: Callable[[], T], settings: Settings, *, gone: Callable[[], T] | None = None) -> T:
    """The result of ``once``, which is called up to ``attempts`` times; raises the error of the last one.

    ``gone`` gives the result of a deletion whose first answer was lost: the second then finds nothing.
    """
    attempt = 0
    while True:
        attempt += 1
        try:
            return once()
        except NotFound:
            if gone is not None and attempt > 1:
                return gone()
            raise
        except (Busy, Stopping, Unreachable, UploadStalled) as error:
            if attempt >= settings.attempts:
                raise
            pause = float(error.fields.get("retry_after") or 0.05 * 2**attempt)
            time.sleep(pause * random.uniform(0.8, 1.2))  # noqa: S311 - spreads clients, guards nothing
