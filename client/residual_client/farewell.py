"""Farewell: what a program does about uploads that are not stored when it ends."""

from __future__ import annotations

import atexit
import logging
import sys
from collections.abc import Sequence

from residual_client.motion import Motion
from residual_client.upload import Upload

__all__ = ["Farewell"]

_logger = logging.getLogger("residual_client")


class Farewell:
    """Waits at the end of the program for named bundles, and names those that are not stored then.

    A named bundle is meant to outlive the program; what nobody was told about is told on stderr and to the logger
    ``residual_client``.
    Methods but `say` are called with the lock of ``motion`` held.
    """

    def __init__(self, motion: Motion, *, seconds: float) -> None:
        self._motion = motion
        self._seconds = seconds
        self._expected: set[Upload] = set()

    def expect(self, upload: Upload) -> None:
        """Have a named upload waited for."""
        if not upload.named:
            return
        if not self._expected:
            # As late as can be: what is registered last is called first, and JAX must still be there.
            atexit.register(self.say)
        self._expected.add(upload)

    def release(self, upload: Upload) -> None:
        """It is stored, withdrawn, or somebody was told that it failed."""
        self._expected.discard(upload)
        if not self._expected:
            atexit.unregister(self.say)

    def say(self) -> None:
        """Wait, and name what is lost; called by Python."""
        if not self._motion.is_here:
            return
        with self._motion.changed:
            self._motion.changed.wait_for(
                lambda: not any(one.pending for one in self._expected), self._seconds
            )
            lost = [one for one in self._expected if not one.is_told]
        if lost:
            _tell(sorted(lost, key=lambda one: one.key), self._seconds)


def _tell(lost: Sequence[Upload], seconds: float) -> None:
    text = "residual-store: the program ends, and these bundles are not stored: " + "; ".join(
        f"{one.key!r} ({one.phase} after {seconds:g} s, the limit exit_seconds)"
        if one.pending
        else f"{one.key!r} ({type(one.error).__name__}: {one.error})"
        for one in lost
    )
    print(text, file=sys.stderr, flush=True)
    if _logger.hasHandlers():
        # Else Python itself would write it to stderr once more.
        _logger.error(text)
