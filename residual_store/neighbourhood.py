"""The neighbourhood: whether a client shares memory with its server, found out once and again when the server is new."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Mapping
from typing import Any

from residual_store.bundle import Payload
from residual_store.errors import StoreUnavailable
from residual_store.neighbour import Neighbour, NotShared
from residual_store.place import Place

__all__ = ["Neighbourhood"]


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
        self._wanted = wanted

    @property
    def note(self) -> str | None:
        """Why there is no shared memory, in one line, once that is known."""
        return self._note

    @property
    def arena(self) -> str | None:
        """The name of the arena that both sides have mapped, as far as that is known by now."""
        neighbour = self._neighbour
        return neighbour.name if neighbour is not None else None

    def negotiated(self) -> str | None:
        """The name of the arena that both sides have mapped, if there is one; asks the server if that is not known."""
        with self._lock:
            if self._neighbour is None and self._note is None:
                self._negotiate()
        return self.arena

    def borrow(self, place: Place, *, writable: bool = False) -> Payload | None:
        """The memory at a place that the server named, as `Neighbour.borrow` gives it."""
        with self._lock:
            if self._wanted and (self._neighbour is None or self._neighbour.name != place.arena):
                self._negotiate()
            neighbour = self._neighbour
        return neighbour.borrow(place, writable=writable) if neighbour is not None else None

    def _negotiate(self) -> None:
        self._neighbour = self._note = None
        with contextlib.suppress(StoreUnavailable):
            try:
                self._neighbour = Neighbour(self._capabilities().get("arena"))
            except NotShared as reason:
                self._note = str(reason)
