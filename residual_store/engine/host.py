"""The host tier: bundles in this process's memory."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, replace

from residual_store.bundle import Bundle
from residual_store.engine.index import Index
from residual_store.engine.late_index import LateIndex
from residual_store.errors import LeafNotHeld, Stopping
from residual_store.key import run_of
from residual_store.manifest import Manifest
from residual_store.settings import Settings
from residual_store.shared_leaf import is_shared_key, shared_keys
from residual_store.store import Stat

__all__ = ["HostTier", "check_held"]


@dataclass(frozen=True)
class _Held:
    stat: Stat
    bundle: Bundle


@dataclass(frozen=True)
class _Copy:
    bundle: Bundle
    digest: str
    """Of the durable bundle that this is a copy of."""


class HostTier:
    """Bundles in the order of their arrival, the leaves that they share, and copies of what is in the durable tier.

    Of a key there is one or the other; a copy may be dropped at any time and does not show in listings.
    No put, get or removal takes longer when there are more bundles.
    """

    def __init__(self, settings: Settings, *, clock: Callable[[], float] = time.time) -> None:
        self.on_removal: Callable[[Bundle], None] = lambda bundle: None
        """Called with each bundle that its key stands for no more, before that can be seen."""
        self.on_renewal: Callable[[Bundle], Bundle] = lambda bundle: bundle
        """Called with a bundle whose lease changes; gives the same bundle at another place."""
        self._index = LateIndex(shared_bytes=settings.dedup_bytes)
        self._clock = clock
        self._settings = settings
        self._held: OrderedDict[str, _Held] = OrderedDict()
        self._shared: OrderedDict[str, _Held] = OrderedDict()
        self._copies: OrderedDict[str, _Copy] = OrderedDict()
        self._resting_bytes = 0
        self._is_closed = False
        self._lock = threading.Lock()

    def close(self) -> None:
        self._is_closed = True
        self._held.clear()
        self._shared.clear()
        self._copies.clear()
        self._index.close()

    @property
    def index(self) -> Index:
        """The index, which knows of all that has happened here until now."""
        with self._lock:
            return self._index.current()

    def put(self, stat: Stat, bundle: Bundle) -> None:
        """Hold a bundle that is nowhere else, or a shared leaf; raises `LeafNotHeld` for one whose shared leaves are not here."""
        with self._lock:
            check_held(stat.key, bundle.manifest, self._shared.__contains__)
            rack = self._rack(stat.key)
            before = rack.get(stat.key)
            # In one step, because who reads takes no lock and must find the one or the other.
            rack[stat.key] = _Held(stat, bundle)
            rack.move_to_end(stat.key)
            self._copies.pop(stat.key, None)
            self._resting_bytes += stat.nbytes
            if before is not None:
                self._resting_bytes -= before.stat.nbytes
                self.on_removal(before.bundle)
            self._index.set(stat, bundle.manifest, until=self._unused_until())

    def _unused_until(self) -> float:
        return self._clock() + self._settings.dedup_seconds

    def _rack(self, key: str) -> OrderedDict[str, _Held]:
        return self._shared if is_shared_key(key) else self._held

    def put_copy(self, stat: Stat, bundle: Bundle) -> None:
        """Hold a copy of a durable bundle."""
        with self._lock:
            if stat.key not in self._rack(stat.key):
                self._copies[stat.key] = _Copy(bundle, stat.digest)

    def find(self, key: str) -> Stat | None:
        """The stat of the bundle with this key, if it is here and nowhere else."""
        if self._is_closed:
            raise Stopping("this store was closed; open it again")
        held = self._held.get(key)
        return held.stat if held is not None else None

    def get(self, key: str, digest: str) -> Bundle | None:
        """The bundle with this key, or a copy of the durable one with this ``digest``, if it is here."""
        if (held := self._held.get(key)) is not None:
            return held.bundle
        copy = self._copies.get(key)
        return copy.bundle if copy is not None and copy.digest == digest else None

    def shared(self, key: str) -> Bundle | None:
        """The shared leaf with this key, if it or a copy of it is here."""
        held = self._shared.get(key) or self._copies.get(key)
        return held.bundle if held is not None else None

    def keep(self, key: str, until: float) -> bool:
        """Let a shared leaf stay until then at least; false if it is not here."""
        with self._lock:
            if key not in self._shared:
                return False
            self._index.extend(key, until)
            return True

    def collect(self, now: float, *, prefix: str = "") -> int:
        """Let go of the shared leaves that no bundle here has and whose lease has ended, and return how many."""
        with self._lock:
            unused = self._index.current().unused(now, prefix=prefix)
            for key in unused:
                self._let_go(key)
            return len(unused)

    def remove(self, key: str) -> None:
        """Let go of a bundle or copy; its memory is free when its last view dies."""
        with self._lock:
            self._let_go(key)

    def lease(self, key: str, expires_at: float | None) -> bool:
        """Set when the lease of a bundle ends; false if it is not here.

        From now on no client takes its copy of the lease that the bundle had for this one.
        """
        with self._lock:
            if (held := self._held.get(key)) is None:
                return False
            stat = replace(held.stat, expires_at=expires_at)
            self._held[key] = replace(held, stat=stat, bundle=self.on_renewal(held.bundle))
            self._index.lease(key, expires_at)
            return True

    def _let_go(self, key: str) -> None:
        self._copies.pop(key, None)
        if (held := self._rack(key).pop(key, None)) is not None:
            self._resting_bytes -= held.stat.nbytes
            self.on_removal(held.bundle)
            self._index.remove(key, until=self._unused_until())

    def drop(self, key: str) -> None:
        """Let go of the copy of what is in the durable tier no more."""
        with self._lock:
            self._copies.pop(key, None)

    def drop_copy(self) -> bool:
        """Let go of the oldest copy; false if there is none."""
        with self._lock:
            if self._copies:
                self._copies.popitem(last=False)
                return True
            return False

    def oldest(self) -> str | None:
        """The key that arrived first of those that are nowhere else: the backward pass wants it last."""
        with self._lock:
            return next(iter(self._held), None)

    def fingerprints(self) -> set[str]:
        """The programs that bundles here name."""
        with self._lock:
            return {
                held.stat.fingerprint for held in self._held.values() if held.stat.fingerprint is not None
            }

    @property
    def resting_bytes(self) -> int:
        """Bytes of the bundles that are nowhere else."""
        return self._resting_bytes

    def as_copy(self, stat: Stat) -> Stat:
        """The stat of a durable bundle that is here as a copy too."""
        copy = self._copies.get(stat.key)
        return replace(stat, tier="host") if copy is not None and copy.digest == stat.digest else stat


def check_held(key: str, manifest: Manifest, is_held: Callable[[str], bool]) -> None:
    """Raise `LeafNotHeld`, which names the leaf, unless all leaves that a bundle shares are held."""
    for leaf, shared_key in zip(manifest.shared, shared_keys(run_of(key), manifest), strict=True):
        if not is_held(shared_key):
            raise LeafNotHeld(
                f"leaf {leaf.index} ({leaf.path}) of {key!r} has no bytes, and its run does not hold them; "
                "send the whole bundle",
                leaf=leaf.path,
                index=leaf.index,
            )
