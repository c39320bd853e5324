"""Motion: the one lock of a client's transfers, and waiting that gives up only when nothing moves any more."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from residual_store.errors import RequestRefused, TransferStalled

__all__ = ["Motion"]


@dataclass(kw_only=True, eq=False)
class Motion:
    """What all transfers of a client share.

    ``changed`` has the lock that guards what becomes of them, and tells of every change.
    ``at`` is when a byte of any of them moved last, or one began or ended (`time.monotonic`).
    ``limit`` is the setting `stall_seconds`.
    """

    limit: float
    changed: threading.Condition = field(default_factory=threading.Condition)
    at: float = 0.0
    process: int = field(default_factory=os.getpid)

    @property
    def is_here(self) -> bool:
        """Whether this is the process that has the threads of the transfers."""
        return self.process == os.getpid()

    def check_process(self) -> None:
        """Raise `RequestRefused` in a process that was forked; called before the lock is taken, which may be held for ever there."""
        if not self.is_here:
            raise RequestRefused(
                f"this client belongs to process {self.process}, and this is process {os.getpid()}, which was forked "
                "from it and has neither its threads nor its connections; connect anew here, or start the process "
                'with multiprocessing.get_context("spawn")'
            )

    def tell(self) -> None:
        """Note that something began or ended; with the lock held."""
        self.at = time.monotonic()
        self.changed.notify_all()

    def wait_while(
        self,
        busy: Callable[[], object],
        stalled: Callable[[], TransferStalled],
        *,
        last: Callable[[], float] | None = None,
    ) -> None:
        """Wait with the lock held while ``busy``; raises ``stalled`` when nothing moved for ``limit`` seconds.

        ``last`` is when what is waited for moved last; else that is ``at``.
        """
        started = time.monotonic()
        while busy():
            moved = self.at if last is None else last()
            left = max(moved, started) + self.limit - time.monotonic()
            if left <= 0:
                raise stalled()
            self.changed.wait(left)
