"""Own puts: what a client has put through shared memory, so that it can get that again without a request.

The ticket of a segment is void from the moment when its bundle is deleted, replaced, spilled, or has its lease changed.
So as long as the ticket holds and the server lives, the bundle is what a request would bring.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from dataclasses import dataclass

from residual_store.manifest import Manifest
from residual_store.place import Place

__all__ = ["OwnPuts", "Put"]

_MOST = 4096


@dataclass(frozen=True)
class Put:
    """The manifest of a bundle, where its leaves are, and until when on the monotonic clock its lease lasts."""

    manifest: Manifest
    place: Place
    ends: float


class OwnPuts:
    """The last few thousand puts of one client, by key."""

    def __init__(self) -> None:
        self._puts: OrderedDict[str, Put] = OrderedDict()
        self._lock = threading.Lock()

    def note(self, key: str, manifest: Manifest, place: Place, *, ends: float) -> None:
        """Remember a put; the oldest is forgotten beyond the limit."""
        with self._lock:
            self._puts[key] = Put(manifest, place, ends)
            self._puts.move_to_end(key)
            if len(self._puts) > _MOST:
                self._puts.popitem(last=False)

    def find(self, key: str) -> Put | None:
        """The put of a key whose lease has not ended."""
        put = self._puts.get(key)
        return put if put is not None and time.monotonic() < put.ends else None

    def forget(self, key: str) -> None:
        """Forget a put that is not there any more."""
        with self._lock:
            self._puts.pop(key, None)
