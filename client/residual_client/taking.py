"""Taking: the bytes of residuals at the moment of an offload, which nothing that happens later can change."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from residual_client.holding import Holding
from residual_client.snapshot import Host, allocated, on_host, take_snapshot
from residual_client.staging import Staging
from residual_store.bundle import Bundle
from residual_store.copier import Copier
from residual_store.manifest import Manifest
from residual_store.segments import SegmentPool
from residual_store.store import Store

__all__ = ["Taking"]


class Taking:
    """Takes the bytes of residuals, into memory of the ``store`` if it lends some and else of the ``pool``.

    So what is in host memory is copied once between the call and the store of a server on the same host.
    """

    def __init__(self, store: Store, staging: Staging, pool: SegmentPool) -> None:
        self._store = store
        self._staging = staging
        self._pool = pool
        self._copier = Copier()

    def close(self) -> None:
        """End the thread that helps to copy."""
        self._copier.close()

    def take(self, key: str, manifest: Manifest, holding: Holding) -> Callable[[], Bundle]:
        """What makes the bundle, and is to be called once; the arrays may be gone by then.

        What an accelerator copies by itself is waited for there, and the rest is copied now.
        Raises `LeafUnavailable`, which names the leaf, for one whose computation failed.
        """
        hosts = self._hosts(holding)
        if hosts is None:
            snapshot = take_snapshot(holding.arrays, self._staging, self._pool)
            return lambda: holding.places.bundle(manifest, snapshot.hosts())
        bundle = self._copied(key, holding.places.bundle(manifest, hosts))
        return lambda: bundle

    def _hosts(self, holding: Holding) -> list[Host] | None:
        """The arrays where they lie, if all are whole in host memory."""
        blocks = [(array.path, block) for array in holding.arrays for block in array.blocks.values()]
        if len(blocks) > len(holding.arrays) or any(self._staging.is_apart(block) for _, block in blocks):
            return None
        return [on_host(path, block) for path, block in blocks]

    def _copied(self, key: str, bundle: Bundle) -> Bundle:
        nbytes = bundle.manifest.nbytes
        lent = self._store.lend(key, nbytes)
        memory = lent if lent is not None else allocated(nbytes, self._pool)
        copy = bundle.copied_into(memory, copier=self._copier)
        # A store of this process may not keep memory of the pool.
        return copy if lent is not None else replace(copy, owned=False)
