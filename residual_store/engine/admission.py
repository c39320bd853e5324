"""Admission: memory for a bundle that is about to come in, if it may come in at all."""

from __future__ import annotations

from residual_store.engine.catalog import Catalog
from residual_store.engine.loans import Loans
from residual_store.engine.memory import HostMemory
from residual_store.engine.terms import check_if_exists, check_size
from residual_store.errors import SegmentUnavailable
from residual_store.key import check_key, run_of
from residual_store.manifest import Manifest
from residual_store.place import Place
from residual_store.segments import Segment
from residual_store.settings import Settings
from residual_store.stat import stat_of
from residual_store.store import IfExists

__all__ = ["Admission"]


class Admission:
    """Gives out segments of a store's memory, to be filled by this process or by a client on the same host."""

    def __init__(self, settings: Settings, *, catalog: Catalog, memory: HostMemory) -> None:
        self._settings = settings
        self._catalog = catalog
        self._memory = memory
        self._loans = Loans(seconds=settings.loan_seconds)

    def admit(self, key: str, manifest: Manifest, *, if_exists: IfExists = "error") -> Segment:
        """A segment for the leaves of a bundle.

        Raises `AlreadyExists`, `TooLarge`, `StoreFull` or `Busy` before a byte of a leaf is read.
        """
        self._check(key, manifest, if_exists)
        return self._memory.allocate(manifest.nbytes, run=run_of(key))

    def lend(self, key: str, nbytes: int) -> Place:
        """The place of a segment that a client fills before it puts ``key``; raises `SegmentUnavailable`, `StoreFull` or `Busy`."""
        run = run_of(check_key(key, self._settings))
        if nbytes > self._settings.max_bundle_bytes:
            raise SegmentUnavailable(f"no segment has {nbytes} bytes; send the bytes in the body")
        self._loans.end_old()
        return self._loans.lend(key, self._memory.allocate(nbytes, run=run))

    def redeem(self, key: str, ticket: str, manifest: Manifest, *, if_exists: IfExists = "error") -> Segment:
        """The segment that was lent for ``key`` and now holds the leaves of ``manifest``; raises as `admit` and `lend` do."""
        segment = self._loans.take(key, ticket)
        if segment.memory.nbytes != manifest.nbytes:
            raise SegmentUnavailable(
                f"the segment has {segment.memory.nbytes} bytes and the manifest says {manifest.nbytes}"
            )
        self._check(key, manifest, if_exists)
        return segment

    def give_back(self, key: str, ticket: str) -> None:
        """End a loan that is not needed."""
        self._loans.give_back(key, ticket)

    def end_old(self) -> None:
        """Take back what was lent to clients that are gone."""
        self._loans.end_old()

    def _check(self, key: str, manifest: Manifest, if_exists: IfExists) -> None:
        check_key(key, self._settings)
        check_size(key, manifest, self._settings)
        check_if_exists(if_exists)
        if self._catalog.may_refuse(key, if_exists):
            new = stat_of(key, manifest, tier="host", arrived=0.0, expires_at=None)
            self._catalog.existing(new, if_exists)
