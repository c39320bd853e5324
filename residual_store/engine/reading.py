"""Reading: a bundle, a leaf or a manifest, from whichever tier has it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from residual_store.bundle import Bundle, Payload
from residual_store.encoding import decode
from residual_store.engine.catalog import Catalog
from residual_store.engine.durable import DurableTier
from residual_store.engine.host import HostTier
from residual_store.engine.memory import HostMemory
from residual_store.errors import DataLoss, NotFound, TooLarge
from residual_store.key import run_of
from residual_store.leaf import Leaf
from residual_store.manifest import Manifest
from residual_store.segment import Segment
from residual_store.shared_leaf import SharedLeaf
from residual_store.store import Stat

__all__ = ["Reading"]


class Reading:
    """Both tiers as one to read from; what comes from the durable tier comes into a segment of host memory."""

    def __init__(
        self, *, catalog: Catalog, host: HostTier, durable: DurableTier | None, memory: HostMemory
    ) -> None:
        self._catalog = catalog
        self._host = host
        self._durable = durable
        self._memory = memory

    def stat(self, key: str) -> Stat:
        """Where and what the living bundle is; raises `NotFound`."""
        return self._catalog.stat(key)

    def bundle(self, key: str, *, verify: bool = False) -> Bundle:
        """The whole bundle; with ``verify`` its digests are checked again if it is in the host tier."""
        return self._settled(key, lambda: self._bundle(key, verify))

    def _bundle(self, key: str, verify: bool) -> Bundle:
        stat = self.stat(key)
        held = self._host.get(key, stat.digest)
        bundle = held if held is not None else self._stored(key)
        if bundle.manifest.shared:
            try:
                bundle = bundle.resolved([self._shared(key, leaf) for leaf in bundle.manifest.shared])
            except DataLoss:
                # Deleted, replaced or spilled meanwhile, and its leaves gone with it.
                if self.stat(key).digest == stat.digest and self._host.get(key, stat.digest) is held:
                    raise
                return self._bundle(key, verify)
        if verify and (held is not None or bundle.parts):
            bundle.verify(DataLoss)
        return bundle

    def _stored(self, key: str) -> Bundle:
        segments: list[Segment] = []
        bundle = self._of_durable(key, lambda durable: durable.read(key, self._allocator(key, segments)))
        return replace(bundle, place=segments[-1].place)

    def shared(self, key: str) -> Bundle:
        """The shared leaf with this key; what was read from the durable tier stays as a copy, because others have it too."""
        found = self._host.shared(key)
        if found is None:
            found = self._stored(key)
            if self._durable is not None and (entry := self._durable.find(key)) is not None:
                self._host.put_copy(entry.stat, found)
        return found

    def _shared(self, key: str, leaf: Leaf) -> Bundle:
        try:
            return self.shared(SharedLeaf.of(leaf).key(run_of(key)))
        except (NotFound, DataLoss) as error:
            raise DataLoss(
                f"the bundle {key!r}: leaf {leaf.index} ({leaf.path}) is missing or damaged, "
                f"and so it is in all bundles of the run that share it: {error}",
                leaf=leaf.path,
                index=leaf.index,
            ) from error

    def leaf(self, key: str, index: int) -> npt.NDArray[np.generic]:
        """One leaf as a host array; raises `NotFound` if the bundle has no such leaf, and `TooLarge`."""
        manifest, payload = self._settled(key, lambda: self._leaf(key, index))
        leaf = manifest.leaves[index]
        # A few bytes can stand for any number of them.
        if leaf.array_nbytes > self._memory.total:
            raise TooLarge(
                f"leaf {index} ({leaf.path}) of {key!r} has {leaf.array_nbytes} bytes as an array, more than the "
                f"{self._memory.total} of host_bytes; get the bundle, which has {leaf.nbytes} for it as {leaf.encoding}"
            )
        return decode(manifest.source(index), payload, as_leaf=leaf)

    def payload(self, key: str, index: int) -> Payload:
        """The bytes of one leaf as they are stored; raises as `leaf` does."""
        return self._settled(key, lambda: self._leaf(key, index))[1]

    def _leaf(self, key: str, index: int) -> tuple[Manifest, Payload]:
        stat = self.stat(key)
        if not 0 <= index < stat.leaves:
            raise NotFound(
                f"the bundle {key!r} has {stat.leaves} leaves, so there is no leaf {index}", key=key
            )
        bundle = self._host.get(key, stat.digest)
        if bundle is not None:
            source = bundle.manifest.source(index)
            own = bundle.payloads[source.index]
            return bundle.manifest, self._shared(key, source).payloads[0] if source.is_shared else own
        return self._of_durable(
            key,
            lambda durable: durable.read_leaf(
                key, index, self._allocator(key, []), lambda leaf: self._shared(key, leaf).payloads[0]
            ),
        )

    def manifest(self, key: str) -> Manifest:
        """The manifest alone."""
        return self._settled(key, lambda: self._manifest(key))

    def _manifest(self, key: str) -> Manifest:
        bundle = self._host.get(key, self.stat(key).digest)
        if bundle is not None:
            return bundle.manifest.resolved
        return self._of_durable(key, lambda durable: durable.read_manifest(key)).resolved

    def _settled[T](self, key: str, look: Callable[[], T]) -> T:
        """The result of ``look``, again if a bundle in memory has replaced the one on disk meanwhile."""
        before = self._host.find(key)
        try:
            return look()
        except NotFound:
            if self._host.find(key) in (None, before):
                raise
        return self._settled(key, look)

    def _of_durable[T](self, key: str, read: Callable[[DurableTier], T]) -> T:
        if self._durable is None:
            raise NotFound(f"there is no bundle {key!r}", key=key)
        return read(self._durable)

    def _allocator(self, key: str, segments: list[Segment]) -> Callable[[int], Payload]:
        """Memory for what is read of a bundle; the ``segments`` that it comes from are noted."""

        def allocate(nbytes: int) -> Payload:
            segments.append(self._memory.allocate(nbytes, run=run_of(key)))
            return segments[-1].memory

        return allocate
