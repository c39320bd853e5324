"""Admission: memory for a bundle that is about to come in, if it may come in at all."""

from __future__ import annotations

from dataclasses import replace

from residual_store.bundle import Bundle
from residual_store.copier import Copier
from residual_store.engine.catalog import Catalog
from residual_store.engine.memory import HostMemory
from residual_store.engine.sharing import Sharing
from residual_store.engine.terms import check_if_exists, check_size
from residual_store.errors import SegmentUnavailable
from residual_store.key import check_key, run_of
from residual_store.manifest import Manifest, decode, encode
from residual_store.place import BlockName
from residual_store.segment import Segment
from residual_store.settings import Settings
from residual_store.stat import stat_of
from residual_store.store import Durability, IfExists

__all__ = ["Admission"]


class Admission:
    """Gives out segments of a store's memory, to be filled by this process or by a client on the same host."""

    def __init__(
        self,
        settings: Settings,
        *,
        catalog: Catalog,
        memory: HostMemory,
        sharing: Sharing,
        copier: Copier,
    ) -> None:
        self._settings = settings
        self._catalog = catalog
        self._memory = memory
        self._sharing = sharing
        self._copier = copier

    def admit(self, key: str, manifest: Manifest, *, if_exists: IfExists = "error") -> Segment:
        """A segment for the leaves of a bundle.

        Raises `AlreadyExists`, `LeafNotHeld`, `TooLarge`, `StoreFull` or `Busy` before a byte of a leaf is read.
        """
        self._check(key, manifest, if_exists)
        return self._memory.allocate(manifest.nbytes, run=run_of(key))

    def admit_at_once(self, key: str, manifest: Manifest, *, if_exists: IfExists) -> Segment | None:
        """What `admit` gives, if there is a segment to be had without waiting for anything; raises what that raises."""
        self._check(key, manifest, if_exists)
        return self._memory.recycle(manifest.nbytes, run=run_of(key))

    def prepare(self, key: str, nbytes: int) -> None:
        """Have an idle segment that a client can take for a put of ``key``; raises `SegmentUnavailable`, `StoreFull` or `Busy`."""
        run = run_of(check_key(key, self._settings))
        if nbytes > self._settings.max_bundle_bytes:
            raise SegmentUnavailable(f"no segment has {nbytes} bytes; send the bytes in the body")
        is_shared = self._memory.allocate(nbytes, run=run).place is not None
        self._memory.settle()
        if not is_shared:
            raise SegmentUnavailable("there is no shared memory left; send the bytes in the body")

    def adopt(self, key: str, block: BlockName, manifest: Manifest) -> Segment:
        """The segment in the block that a client has taken, and fills with the leaves of ``manifest``.

        What stands under the key is looked at when all digests are there.
        Raises `SegmentUnavailable` if that is no such block, and whatever `admit` raises but `AlreadyExists`.
        """
        self._check(key, manifest, if_exists="replace")
        segment = self._memory.adopt(block, manifest.nbytes, run=run_of(key))
        if segment is None:
            raise SegmentUnavailable(
                "no client has taken a segment of this run there; send the bytes in the body"
            )
        return segment

    def take_in(self, key: str, bundle: Bundle, durability: Durability, if_exists: IfExists) -> Bundle:
        """A bundle of the caller's memory, sealed, and copied if it is to stay in memory."""
        if durability == "host" and not self._catalog.may_refuse(key, if_exists):
            return self._copied(bundle, self._memory.allocate(bundle.manifest.nbytes, run=run_of(key)))
        bundle = bundle.sealed(check=True, copier=self._copier)
        if durability == "host":
            segment = self.admit(key, bundle.manifest, if_exists=if_exists)
            return self._copied(bundle, segment)
        return self._readable(bundle)

    def _copied(self, bundle: Bundle, segment: Segment) -> Bundle:
        return self._readable(
            replace(bundle.copied_into(segment.memory, copier=self._copier), place=segment.place)
        )

    def _readable(self, bundle: Bundle) -> Bundle:
        """The bundle, if what is put here can be read later too."""
        decode(encode(bundle.manifest), self._settings)
        return bundle

    def _check(self, key: str, manifest: Manifest, if_exists: IfExists) -> None:
        check_key(key, self._settings)
        check_size(key, manifest, self._settings)
        check_if_exists(if_exists)
        if self._catalog.may_refuse(key, if_exists):
            new = stat_of(key, manifest, tier="host", arrived=0.0, expires_at=None)
            self._catalog.same(new, if_exists)
        self._sharing.admit(key, manifest)
