"""The neighbourhood: whether a client shares memory with its server, found out once and again when the server is new."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Mapping
from typing import Any

from residual_store.bundle import Payload
from residual_store.errors import StoreUnavailable
from residual_store.neighbour import Neighbour, NotShared
from residual_store.place import BlockName, Place

__all__ = ["Neighbourhood"]

_ATTEMPTS = 4

log = logging.getLogger("residual_store")


class Neighbourhood:
    """The server as a `Neighbour`, if it is one.

    ``capabilities`` asks the server what it can do; it is called when that is first of use, and again when the server turns
    out to have another arena than before.
    """

    def __init__(self, capabilities: Callable[[], Mapping[str, Any]], *, wanted: bool) -> None:
        self._capabilities = capabilities
        self._lock = threading.Lock()
        self._neighbour: Neighbour | None = None
        self._note = None if wanted else "shared memory is turned off"

    @property
    def note(self) -> str | None:
        """Why there is no shared memory, in one line, once that is known."""
        return self._note

    @property
    def neighbour(self) -> Neighbour | None:
        """The server, as far as it is known by now that it is one.

        The memory of one that is gone is let go of, which would stay in the machine's memory otherwise.
        """
        neighbour = self._neighbour
        if neighbour is None or neighbour.lives:
            return neighbour
        self.forget()
        return None

    @property
    def arena(self) -> str | None:
        """The name of the arena that both sides have mapped, as far as that is known by now."""
        neighbour = self.neighbour
        return neighbour.name if neighbour is not None else None

    def negotiated(self) -> Neighbour | None:
        """The server, if it is one; asks it if that is not known."""
        if self.neighbour is None:
            with self._lock:
                if self._neighbour is None and self._note is None:
                    self._negotiate()
        return self._neighbour

    def borrow(self, place: Place) -> Payload | None:
        """The memory at a place that the server named, as `Neighbour.borrow` gives it."""
        neighbour = self.neighbour
        return neighbour.borrow(place) if neighbour is not None else None

    def take(self, nbytes: int, run: str, prepare: Callable[[], None]) -> tuple[BlockName, Payload] | None:
        """An idle block of the server, as `Neighbour.take` gives it; ``prepare`` asks the server to have one."""
        for attempt in range(_ATTEMPTS):
            neighbour = self.negotiated()
            if neighbour is None:
                return None
            if (taken := neighbour.take(nbytes, run)) is not None:
                return taken
            if attempt:
                # What was prepared is not there to take: another client was faster, or the server is another one by now.
                self.forget()
            prepare()
        return None

    def take_at_hand(self, nbytes: int, run: str) -> tuple[BlockName, Payload] | None:
        """The same without any request."""
        neighbour = self.neighbour
        return neighbour.take(nbytes, run) if neighbour is not None else None

    def share(self, block: BlockName) -> None:
        """Let others read a block, as `Neighbour.share` does."""
        if self._neighbour is not None and self._neighbour.name == block.arena:
            self._neighbour.share(block)

    def forget(self) -> None:
        """Ask the server anew at the next occasion."""
        with self._lock:
            self._neighbour = None

    def _negotiate(self) -> None:
        self._neighbour = self._note = None
        with contextlib.suppress(StoreUnavailable):
            try:
                self._neighbour = Neighbour(self._capabilities().get("arena"))
            except NotShared as reason:
                self._note = str(reason)
                log.warning(
                    "bundles go over HTTP, not through memory: %s; segments=False says it is meant so", reason
                )
