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

_MOST_LEAVES = 65_536
"""A leaf takes 300 to 600 bytes and a put 700 more, so a client keeps some 20 to 70 MB of manifests at most."""


@dataclass(frozen=True)
class Put:
    """The manifest of a bundle, where its leaves are, and until when on the monotonic clock its lease lasts."""

    manifest: Manifest
    place: Place
    ends: float


class OwnPuts:
    """The last puts of one client, by key, as many as have 65,536 leaves together."""

    def __init__(self) -> None:
        self._puts: OrderedDict[str, Put] = OrderedDict()
        self._leaves = 0
        self._lock = threading.Lock()

    def note(self, key: str, manifest: Manifest, place: Place, *, ends: float) -> None:
        """Remember a put; the oldest is forgotten beyond the limit."""
        with self._lock:
            self._drop(key)
            self._puts[key] = Put(manifest, place, ends)
            self._leaves += len(manifest.leaves)
            while self._leaves > _MOST_LEAVES and len(self._puts) > 1:
                self._drop(next(iter(self._puts)))

    def find(self, key: str) -> Put | None:
        """The put of a key whose lease has not ended."""
        put = self._puts.get(key)
        return put if put is not None and time.monotonic() < put.ends else None

    def forget(self, key: str) -> None:
        """Forget a put that is not there any more."""
        with self._lock:
            self._drop(key)

    def forget_all(self, prefix: str) -> None:
        """The same for all keys with a prefix."""
        with self._lock:
            for key in [key for key in self._puts if key.startswith(prefix)]:
                self._drop(key)

    def _drop(self, key: str) -> None:
        if (put := self._puts.pop(key, None)) is not None:
            self._leaves -= len(put.manifest.leaves)
