"""A bundle: the saved state of one VJP object, a manifest and the bytes of its leaves."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import msgspec
import numpy as np
import numpy.typing as npt

from residual_store import encoding
from residual_store.copier import Copier
from residual_store.digest import Copied, Payload, digest_of
from residual_store.dtypes import name_of
from residual_store.errors import DataLoss, InvalidFrame
from residual_store.layout import offsets_of
from residual_store.leaf import Leaf
from residual_store.manifest import Manifest, UserValue, labels
from residual_store.place import Place
from residual_store.settings import Settings

__all__ = ["Bundle", "Payload", "damaged", "digest_of"]


@dataclass(frozen=True, kw_only=True)
class Bundle:
    """A manifest and, for each leaf, its encoded bytes as a one-dimensional uint8 array.

    ``owned`` says that nobody else can change the payloads, so a store may keep them without a copy.
    ``place`` says where other processes of this host find the leaf area, if they can.
    ``area`` is the leaf area of a frame, gaps included, if the payloads are views of one.
    ``parts`` are the bundle as it is stored and those of its shared leaves, if it was put together from such.

    >>> bundle = Bundle.of_arrays({"h": np.arange(3.0)})
    >>> bundle.array(0)
    array([0., 1., 2.])
    """

    manifest: Manifest
    payloads: tuple[Payload, ...]
    owned: bool = False
    place: Place | None = None
    area: Payload | None = None
    parts: tuple[Bundle, ...] = ()

    @classmethod
    def of_arrays(
        cls, arrays: Mapping[str, npt.ArrayLike], *, user: Mapping[str, UserValue] | None = None
    ) -> Bundle:
        """A bundle of named host arrays, for use without JAX.

        Raises `InvalidManifest` for a dtype that JAX does not have, such as object or longdouble.
        """
        hosts = [np.asarray(array) for array in arrays.values()]
        leaves = [
            Leaf(
                index=index,
                channel="opaque_residuals",
                path=name,
                dtype=name_of(host.dtype),
                shape=host.shape,
            )
            for index, (name, host) in enumerate(zip(arrays, hosts, strict=True))
        ]
        given = labels(user, Settings()) if user else {}
        manifest = Manifest(leaves=tuple(leaves), created=time.time(), user=given)
        return cls.encoded(manifest, hosts, identities=list(map(id, arrays.values())))

    @classmethod
    def encoded(
        cls, manifest: Manifest, hosts: list[npt.NDArray[np.generic]], *, identities: list[int]
    ) -> Bundle:
        """The bundle of ``manifest`` whose leaves have the values ``hosts``; finds constants, bit masks, tiles and repetitions.

        ``identities`` has equal numbers where two leaves are one array.
        No bytes are copied but those of arrays that are not contiguous and little-endian, so the hosts must stay as they
        are until the bundle is stored.
        Large leaves have no digest yet: it is taken when their bytes are, see `copied_into` and `sealed`.
        """
        encoded = encoding.encode_all(hosts, identities, tiles=[leaf.tiles for leaf in manifest.leaves])
        payloads = tuple([one.payload for one in encoded])
        lengths = [payload.size for payload in payloads]
        leaves = [
            msgspec.structs.replace(
                leaf,
                encoding=one.encoding,
                alias_of=one.alias_of,
                same_array=one.same_array,
                offset=offset,
                nbytes=nbytes,
                digest=one.digest,
            )
            for leaf, one, nbytes, offset in zip(
                manifest.leaves, encoded, lengths, offsets_of(lengths), strict=True
            )
        ]
        return cls(manifest=replace(manifest, leaves=tuple(leaves)), payloads=payloads)

    def array(self, index: int) -> npt.NDArray[np.generic]:
        """The values of one leaf as a host array; raises IndexError.

        It is a read-only view of the bundle where the encoding allows that.
        """
        source = self.manifest.source(index)
        return encoding.decode(source, self.payloads[source.index], as_leaf=self.manifest.leaves[index])

    @classmethod
    def of_segment(cls, manifest: Manifest, segment: Payload) -> Bundle:
        """The bundle whose leaf area is ``segment``, which nobody changes from now on."""
        segment.flags.writeable = False
        # Not even by who sets that flag again: the next one who reads the bundle would get other values.
        area = np.asarray(memoryview(segment).toreadonly())
        payloads = tuple(area[leaf.offset : leaf.offset + leaf.nbytes] for leaf in manifest.leaves)
        return cls(manifest=manifest, payloads=payloads, owned=True)

    @classmethod
    def of_area(cls, manifest: Manifest, area: Payload) -> Bundle:
        """The same for a segment whose gaps hold nothing that must not be sent."""
        return replace(cls.of_segment(manifest, area), area=area[: manifest.nbytes])

    def resolved(self, shared: Sequence[Bundle]) -> Bundle:
        """The bundle with its ``shared`` leaves in it, one bundle of one leaf for each of them in order."""
        payloads, found = list(self.payloads), iter(shared)
        for leaf in self.manifest.shared:
            payloads[leaf.index] = next(found).payloads[0]
        return Bundle(
            manifest=self.manifest.resolved,
            payloads=tuple(payloads),
            owned=True,
            parts=(self, *shared),
        )

    @property
    def is_sealed(self) -> bool:
        """Whether every leaf has its digest."""
        return all(leaf.is_sealed for leaf in self.manifest.leaves)

    def sealed(self, *, check: bool = False, copier: Copier | None = None) -> Bundle:
        """The same bundle with the digest of every leaf, taken by the ``copier`` if there is one.

        With ``check``, raises `InvalidFrame` as `with_digests` does.
        """
        if self.is_sealed and not check:
            return self
        self._check_lengths()
        leaves = self.manifest.leaves
        hashed = [leaf.index for leaf in leaves if not leaf.is_shared and (check or not leaf.is_sealed)]
        payloads = [self.payloads[index] for index in hashed]
        taken = copier.digests(payloads) if copier is not None else map(digest_of, payloads)
        digests = [leaf.digest for leaf in leaves]
        for index, digest in zip(hashed, taken, strict=True):
            digests[index] = digest
        return self.with_digests(digests)

    def copied_into(
        self,
        segment: Payload,
        *,
        copier: Copier,
        copied: Copied = lambda start, stop: None,
    ) -> Bundle:
        """The same bundle, sealed, with its leaves copied into ``segment``; raises what `with_digests` does.

        The arguments are those of `copy_into`.
        """
        return Bundle.of_area(self._sealed(self.copy_into(segment, copier=copier, copied=copied)), segment)

    def copy_into(
        self,
        segment: Payload,
        *,
        copier: Copier,
        copied: Copied = lambda start, stop: None,
    ) -> list[bytes]:
        """Copy the leaves into ``segment``, which is ``manifest.nbytes`` long, and return their digests.

        They are those of the bytes in the segment, taken while these are in the cache.
        ``copied`` is called with the start and the end of what has been copied, part by part, from any thread.
        Raises `InvalidFrame`, which names the leaf, if a leaf is not as long as the manifest says.
        """
        self._check_lengths()
        copies, end = [], 0
        for leaf, payload in zip(self.manifest.leaves, self.payloads, strict=True):
            if leaf.offset > end:
                segment[end : leaf.offset] = 0
            stop = leaf.offset + leaf.nbytes
            copies.append((payload, segment[leaf.offset : stop], leaf.offset))
            end = stop or end
        digests = copier.copy(copies, copied=copied)
        for leaf in self.manifest.shared:
            digests[leaf.index] = leaf.digest
        return digests

    def _check_lengths(self) -> None:
        for leaf, payload in zip(self.manifest.leaves, self.payloads, strict=True):
            if payload.nbytes != leaf.nbytes:
                raise damaged(leaf, InvalidFrame)

    def with_digests(self, digests: Sequence[bytes]) -> Bundle:
        """The same bundle with the ``digests`` of its leaves, taken elsewhere; an alias has that of its source.

        Raises `InvalidFrame`, which names the leaf, if a leaf had another digest before.
        """
        return replace(self, manifest=self._sealed(digests))

    def _sealed(self, digests: Sequence[bytes]) -> Manifest:
        if list(digests) == [leaf.digest for leaf in self.manifest.leaves]:
            return self.manifest
        leaves = []
        for leaf in self.manifest.leaves:
            digest = digests[self.manifest.source(leaf.index).index]
            if leaf.is_sealed and leaf.digest != digest:
                raise damaged(leaf, InvalidFrame)
            leaves.append(leaf if leaf.digest == digest else msgspec.structs.replace(leaf, digest=digest))
        return replace(self.manifest, leaves=tuple(leaves))

    def verify(self, error: type[InvalidFrame | DataLoss]) -> None:
        """Raise ``error``, which names the leaf, if any leaf's bytes differ from its digest."""
        leaves = self.manifest.leaves
        for leaf, payload in zip(leaves, self.payloads, strict=True):
            digest = digest_of(payload) if leaf.alias_of is None else leaves[leaf.alias_of].digest
            if leaf.digest != digest and not leaf.is_shared:
                raise damaged(leaf, error)


def damaged[E: InvalidFrame | DataLoss](leaf: Leaf, error: type[E]) -> E:
    """The error for a leaf whose bytes are not those of its digest."""
    return error(
        f"leaf {leaf.index} ({leaf.path}) is damaged: its bytes do not match its digest",
        leaf=leaf.path,
        index=leaf.index,
    )
