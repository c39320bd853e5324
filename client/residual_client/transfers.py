"""Transfers: what goes on between a client and its store, mostly in other threads."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterable
from functools import partial

from residual_client.farewell import Farewell
from residual_client.handle import Handle
from residual_client.holding import Holding
from residual_client.jax_compat import release_dead_arrays
from residual_client.known_leaves import KnownLeaves
from residual_client.motion import Motion
from residual_client.offload import Draft, Terms
from residual_client.prefetch import Prefetch
from residual_client.program import Program
from residual_client.program_cache import ProgramCache
from residual_client.room import Room, WhenFull
from residual_client.sharding import Attempts
from residual_client.staging import Staging
from residual_client.taking import Taking
from residual_client.upload import Progress, Upload
from residual_client.uploads import Uploads
from residual_client.workers import Workers
from residual_store.bundle import Bundle
from residual_store.errors import BundleReplaced, Busy, NotFound, RequestRefused, StoreUnavailable
from residual_store.manifest import Manifest
from residual_store.segments import SegmentPool
from residual_store.stat import digest_of_manifest
from residual_store.store import Store

__all__ = ["Transfers"]

_logger = logging.getLogger(__name__)

_LOOK_AGAIN_SECONDS, _TOLD_SECONDS = 0.02, 10.0
_HELD = (
    "arrays that were restored before may hold the memory, so drop them, wait for their gradients with "
    "jax.block_until_ready, or raise host_bytes"
)

_UPLOAD_BYTES, _LEAF_BYTES = 8 << 10, 1 << 10
"""Memory of an upload besides the bytes of its leaves, as measured: for itself, and for each leaf."""


class Transfers:
    """Uploads, prefetch and all other ways to the store of one client, within the limits of the store's settings."""

    def __init__(
        self,
        store: Store,
        *,
        staging: Staging,
        programs: ProgramCache,
        attempts: Attempts,
        when_full: WhenFull,
    ) -> None:
        settings = store.settings
        self._store = store
        self._attempts = attempts
        self._known_leaves = KnownLeaves(store)
        self._is_closed = False
        self._programs = programs
        self._motion = Motion(limit=settings.stall_seconds)
        workers = Workers(most=settings.transfer_threads)
        self._uploads = Uploads(
            workers,
            Room(self._motion, settings, when_full=when_full),
            motion=self._motion,
            delete=store.delete,
            farewell=Farewell(self._motion, seconds=settings.exit_seconds),
        )
        self._prefetch = Prefetch(
            workers,
            motion=self._motion,
            get=store.get,
            most=min(settings.prefetch_bytes, settings.host_budget // 4),
        )
        # Restored arrays may stand on a snapshot that is stored by now, so there is more than what is in flight.
        self._pool = SegmentPool(
            total=2 * settings.max_inflight_bytes,
            smallest=settings.pooled_bytes,
            idle_seconds=settings.segment_idle_seconds,
        )
        self._taking = Taking(store, staging, self._pool)

    def begin(self) -> None:
        """Before every call: raise `RequestRefused` in a forked process or after `close`, and let go of what nobody refers to.

        That is memory under dead arrays, and scratch bundles whose handles are gone; these are deleted in the background.
        """
        self._motion.check_process()
        if self._is_closed:
            raise RequestRefused("this client was closed; connect again")
        release_dead_arrays()
        self._uploads.sweep()

    # To the store

    def take(
        self,
        manifest: Manifest,
        holding: Holding,
        program: Program | None,
        terms: Terms,
        *,
        named: bool,
        progress: Progress | None,
    ) -> Upload:
        """Take the bytes of residuals that have been checked, and have them stored."""
        # What waits has a manifest too, which small leaves must not hide.
        nbytes = max(holding.nbytes, _UPLOAD_BYTES + _LEAF_BYTES * len(manifest.leaves))
        with self._uploads.room(terms.key, nbytes):
            draft = Draft(program=program, part=holding.places.part, terms=terms)
            upload = Upload(
                terms.key,
                named=named,
                nbytes=nbytes,
                encode=self._taking.take(terms.key, manifest, holding),
                put=partial(draft.put, self._known_leaves, self._programs),
                motion=self._motion,
                part=draft.part,
                progress=progress,
            )
            self._prefetch.drop(terms.key)
            self._uploads.start(upload)
        return upload

    def noted(self, handle: Handle) -> Handle:
        """The same handle, which may be wanted when those after it have been restored."""
        self._prefetch.arrived(handle)
        return handle

    def forget(self, upload: Upload) -> None:
        """What a finalizer of a scratch handle calls."""
        self._uploads.forget(upload)

    def delete(self, source: Handle | str) -> None:
        """Delete a bundle, whether it is stored already or not; that of a handle, and not one that stands in its place."""
        self.begin()
        key = _key_of(source)
        self._prefetch.drop(key)
        with contextlib.suppress(NotFound):
            if isinstance(source, Handle):
                self._delete_that_of(source)
            else:
                self._uploads.withdraw(key)
                self._store.delete(key)

    def _delete_that_of(self, handle: Handle) -> None:
        upload = None if handle.local is None else handle.local.upload
        if upload is not None and handle.scratch and upload.pending:
            self._uploads.forget(upload)
            self._uploads.sweep()
            return
        if upload is not None:
            self._uploads.withdraw(handle.key, upload)
        if handle.state == "stored":
            self._store.delete(handle.key, digest=self._digest(handle))
        elif upload is not None and isinstance(upload.error, StoreUnavailable):
            self._delete_if_stored(handle)

    def _delete_if_stored(self, handle: Handle) -> None:
        """Delete what an upload has stored without knowing it, because the answer was lost."""
        manifest = self._store.manifest(handle.key)
        if handle.local is not None and manifest.created == handle.local.created:
            self._store.delete(handle.key, digest=digest_of_manifest(manifest))

    def _digest(self, handle: Handle) -> str:
        """That of the stored bundle, which the handle of one of several processes does not know."""
        if not handle.is_of_attempt:
            return handle.digest
        manifest = self._store.manifest(handle.key)
        if not handle.stands_for(manifest):
            raise NotFound(f"the bundle {handle.key!r} was replaced", key=handle.key)
        return digest_of_manifest(manifest)

    def flush(self) -> None:
        """Wait for all uploads, as `Uploads.flush` does."""
        self._motion.check_process()
        self._uploads.flush()

    @property
    def is_here(self) -> bool:
        """Whether this is the process of the client, and not one that was forked from it."""
        return self._motion.is_here

    def close(self) -> None:
        """Wait for what is to stay, and let go of the rest, as `Uploads.finish` does."""
        self._is_closed = True
        with contextlib.ExitStack() as stack:
            stack.callback(self._pool.close)
            stack.callback(self._taking.close)
            stack.callback(self._prefetch.clear)
            self._uploads.finish()

    # From the store

    def bundle(self, source: Handle | str, wait: float) -> tuple[str, Bundle]:
        """Key and bundle of a handle or key; raises `BundleReplaced` if the bundle is not that of the handle."""
        self.begin()
        if not isinstance(source, Handle):
            return _key_of(source), self._stored(source, wait)
        bundle = self._in_memory(source)
        if bundle is None:
            bundle = self._stored(source, wait)
            if not source.stands_for(bundle.manifest):
                raise BundleReplaced(
                    f"the bundle {source.key!r} was replaced after this handle was made; use the key if the new one is wanted",
                    key=source.key,
                )
        self.prefetch(self._prefetch.before(source))
        return source.key, bundle

    def _in_memory(self, handle: Handle) -> Bundle | None:
        """The bundle of a handle that is not stored yet, or was fetched before; raises why it was not stored, if so."""
        if handle.local is not None:
            upload = handle.local.upload
            bundle = upload.bundle() if upload.part is None else None
            if bundle is not None:
                return bundle
            handle.wait()
        return self._prefetch.take(handle)

    def _stored(self, source: Handle | str, wait: float) -> Bundle:
        key = _key_of(source)
        self._uploads.settle(key)
        bundle = self._as_memory_allows(key, lambda: self._attempts.get(self._store, source, wait=wait))
        first = bundle.manifest.key
        if isinstance(source, str) and first not in (None, key):
            raise BundleReplaced(
                f"under {key!r} is a bundle that was first put as {first!r}, so it may be a copy, or the wrong one; "
                f"restore {first!r}, or a Handle of {key!r} with the digest that is wanted",
                key=key,
            )
        return bundle

    def _as_memory_allows(self, key: str, get: Callable[[], Bundle]) -> Bundle:
        """What ``get`` gives, as soon as there is room for it.

        Arrays that were restored before hold memory of the store until what computes with them has ended, which JAX begins
        and does not wait for; so a loop of restores and backwards runs ahead of the processor.
        """
        started, is_told = time.monotonic(), False
        while True:
            try:
                return get()
            except Busy as error:
                self._prefetch.clear()
                waited = time.monotonic() - started
                if waited > self._motion.limit:
                    raise error.retold(f"{key!r}: {error.detail}; {_HELD}", key=key) from error
            if waited > _TOLD_SECONDS and not is_told:
                _logger.warning("the restore of %r waits for memory of the store: %s", key, _HELD)
                is_told = True
            time.sleep(_LOOK_AGAIN_SECONDS)
            release_dead_arrays()

    def prefetch(self, handles: Iterable[Handle]) -> None:
        """Fetch bundles in the background, as far as there is room.

        Those that are not stored are in memory already, and those of several processes may not be whole yet.
        """
        self._motion.check_process()
        self._prefetch.want(filter(_can_be_fetched, handles), self._nbytes)

    def _nbytes(self, handle: Handle) -> int:
        return self._store.stat(handle.key).nbytes if handle.local is None else handle.wait().nbytes


def _key_of(source: Handle | str) -> str:
    if not isinstance(source, Handle | str):
        raise TypeError(f"a bundle is named by its handle or its key, and this is a {type(source).__name__}")
    return source if isinstance(source, str) else source.key


def _can_be_fetched(handle: Handle) -> bool:
    return handle.state == "stored" and (handle.local is None or handle.local.upload.part is None)
