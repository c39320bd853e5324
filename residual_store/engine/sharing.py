"""Sharing: leaves that the bundles of a run have in common are held once, and collected when no bundle has them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from residual_store.bundle import Bundle, Payload
from residual_store.copier import Copier
from residual_store.engine.host import HostTier, check_held
from residual_store.engine.memory import HostMemory
from residual_store.engine.reading import Reading
from residual_store.engine.shared_on_disk import SharedOnDisk
from residual_store.errors import InvalidFrame, NotFound, StoreBroken, StoreUnavailable
from residual_store.manifest import Manifest
from residual_store.settings import Settings
from residual_store.shared_leaf import SharedLeaf
from residual_store.stat import stat_of
from residual_store.store import Durability

__all__ = ["Sharing"]

_SLOWEST_UPLOAD = 1 << 20
"""Bytes per second; a shared leaf is kept for an upload that is no slower."""


class Sharing:
    """The shared leaves of both tiers; a bundle and the leaves that it shares are always in the same tier.

    A leaf is made a shared one when the second bundle asks for it, out of the first one, which has it as its own.
    """

    def __init__(
        self,
        *,
        host: HostTier,
        on_disk: SharedOnDisk | None,
        memory: HostMemory,
        reading: Reading,
        copier: Copier,
        settings: Settings,
        clock: Callable[[], float],
    ) -> None:
        self._host = host
        self._on_disk = on_disk
        self._memory = memory
        self._reading = reading
        self._copier = copier
        self._settings = settings
        self._clock = clock

    def held(self, run: str, leaves: Sequence[SharedLeaf], durability: Durability) -> tuple[bool, ...]:
        """Which of these leaves a bundle of this durability can share; they stay for a while."""
        hold = self._in_host if durability == "host" else self._in_durable
        return tuple(hold(run, leaf) for leaf in leaves)

    def admit(self, key: str, manifest: Manifest) -> None:
        """Keep the leaves that a bundle shares until it has come in; raises `LeafNotHeld`."""
        until = self._until(manifest.nbytes / _SLOWEST_UPLOAD)
        check_held(key, manifest, lambda shared_key: self._keep(shared_key, until))

    def collect(self, now: float | None = None, *, prefix: str = "") -> None:
        """Remove what no bundle has any more, when its time is over."""
        now = self._clock() if now is None else now
        self._host.collect(now, prefix=prefix)
        for key in self._on_disk.collect(now, prefix=prefix) if self._on_disk is not None else ():
            self._host.drop(key)

    def drop(self, prefix: str) -> None:
        """Remove the shared leaves whose keys start so and that no bundle has, at once."""
        self.collect(math.inf, prefix=prefix)

    def _until(self, seconds: float = 0.0) -> float:
        return self._clock() + self._settings.dedup_seconds + seconds

    def _keep(self, key: str, until: float) -> bool:
        here = self._host.keep(key, until)
        return (self._on_disk is not None and self._on_disk.keep(key, until)) or here

    def _in_durable(self, run: str, leaf: SharedLeaf) -> bool:
        key = leaf.key(run)
        if self._on_disk is None or not self._on_disk.possible:
            return False
        if self._on_disk.keep(key, self._until()):
            return True
        # Outside of the locks, because it may take memory, and so spill other bundles.
        bundle = self._made(run, leaf, lambda bundle: bundle.sealed(check=True, copier=self._copier))
        return bundle is not None and self._on_disk.keep(key, self._until(), bundle=bundle)

    def _in_host(self, run: str, leaf: SharedLeaf) -> bool:
        key = leaf.key(run)
        if self._host.keep(key, self._until()):
            return True
        bundle = self._made(run, leaf, lambda bundle: self._copied(run, bundle))
        if bundle is None:
            return False
        stat = stat_of(key, bundle.manifest, tier="host", arrived=self._clock(), expires_at=self._until())
        self._host.put(stat, bundle)
        return True

    def _copied(self, run: str, bundle: Bundle) -> Bundle:
        segment = self._memory.allocate(bundle.manifest.nbytes, run=run)
        return replace(bundle.copied_into(segment.memory, copier=self._copier), place=segment.place)

    def _made(self, run: str, leaf: SharedLeaf, make: Callable[[Bundle], Bundle]) -> Bundle | None:
        """The leaf, made from the first source that has its bytes still."""
        for read in self._sources(leaf.key(run)):
            try:
                return make(leaf.bundle(read()))
            except (InvalidFrame, NotFound, StoreBroken):
                continue
            except StoreUnavailable:
                return None
        return None

    def _sources(self, shared_key: str) -> Iterator[Callable[[], Payload]]:
        """Ways to the bytes of a leaf: as it is shared in the other tier, or as a bundle's own."""
        yield lambda: self._reading.shared(shared_key).payloads[0]
        for index in [self._host.index, *([self._on_disk.index] if self._on_disk is not None else [])]:
            for key, number in index.holders(shared_key):
                yield lambda key=key, number=number: self._reading.payload(key, number)  # type: ignore[misc]
