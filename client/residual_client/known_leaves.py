"""Known leaves: what a client has seen in a run, so that large leaves which the run holds are not sent again."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from residual_client.turns import Turns
from residual_store.bundle import Bundle
from residual_store.digest import Payload, digest_of
from residual_store.errors import LeafNotHeld
from residual_store.key import run_of
from residual_store.leaf import Leaf
from residual_store.parts import Part
from residual_store.repetition import sample_of
from residual_store.shared_leaf import SharedLeaf, with_shared
from residual_store.store import Durability, IfExists, Receipt, Store

__all__ = ["KnownLeaves"]

_MOST_LEAVES = 16_384
_IN_VAIN_BYTES, _IN_VAIN_SHARE = 256 << 20, 16
"""What may be asked for in vain: so many bytes, so much as was found, and this share of all, because each is hashed."""


@dataclass
class _Record:
    """Bytes of large leaves of one kind in one run: all, those that were found by asking, and those asked for in vain."""

    seen: int = 0
    found: int = 0
    in_vain: int = 0

    def note(self, nbytes: int, *, is_held: bool) -> None:
        if is_held:
            self.found += nbytes
        else:
            self.in_vain += nbytes

    @property
    def is_worth_asking(self) -> bool:
        return self.in_vain <= _IN_VAIN_BYTES + self.found + self.seen // _IN_VAIN_SHARE


class KnownLeaves:
    """Puts bundles without the large leaves that their run holds already.

    The content decides: the xxh3-128 of the bytes, with dtype and shape.
    That an array is the object which was put before says nothing: on a CPU it may stand on a buffer of numpy's that has
    changed since, and hashing takes a thirtieth of a second for a GiB.
    A leaf that this client has put into the run, as a sample of its bytes tells, and any other one, which another process
    may have put, are asked for as long as that was not in vain too often for such leaves.
    All that a bundle asks for is one request.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._samples: OrderedDict[tuple[object, ...], None] = OrderedDict()
        self._records: dict[tuple[str, bool], _Record] = {}
        self._turns = Turns()
        self._lock = threading.Lock()

    def put(
        self,
        key: str,
        bundle: Bundle,
        *,
        durability: Durability | None,
        ttl: float | None,
        if_exists: IfExists,
        part: Part | None,
        moved: Callable[[int], object],
    ) -> Receipt:
        """As `Store.put`; a part goes as it is, because its leaves are pieces of those that the run holds."""

        def put(one: Bundle) -> Receipt:
            return self._store.put(
                key, one, durability=durability, ttl=ttl, if_exists=if_exists, part=part, moved=moved
            )

        if part is not None:
            return put(bundle)
        run, least = run_of(key), self._store.settings.dedup_bytes
        large = [leaf for leaf in bundle.manifest.leaves if leaf.is_large(least)]
        samples = {leaf.index: (run, *_sample(leaf, bundle.payloads[leaf.index])) for leaf in large}
        # An upload at the same time may be bringing what this one would ask for in vain.
        with self._turns.taken(set(samples.values())) as end:
            asked = self._worth_asking(run, large, samples)
            whole, smaller = self._without_held(run, bundle, asked, durability)
            end({samples[leaf.index] for leaf in smaller.manifest.shared})
            try:
                receipt = put(smaller)
            except LeafNotHeld:
                receipt = put(whole)
        self._remember(samples.values())
        return receipt

    def _worth_asking(
        self, run: str, large: list[Leaf], samples: Mapping[int, tuple[object, ...]]
    ) -> list[tuple[Leaf, _Record]]:
        """The leaves to ask for, each with the record of its kind: put by this client before, or new to it."""
        with self._lock:
            asked = []
            for leaf in large:
                record = self._records.setdefault((run, samples[leaf.index] in self._samples), _Record())
                record.seen += leaf.nbytes
                if record.is_worth_asking:
                    asked.append((leaf, record))
            return asked

    def _without_held(
        self,
        run: str,
        bundle: Bundle,
        asked: list[tuple[Leaf, _Record]],
        durability: Durability | None,
    ) -> tuple[Bundle, Bundle]:
        """The bundle with the digests of what is asked for, and the same without what the run holds."""
        if not asked:
            return bundle, bundle
        leaves = list(bundle.manifest.leaves)
        for leaf, _ in asked:
            digest = leaf.digest if leaf.is_sealed else digest_of(bundle.payloads[leaf.index])
            leaves[leaf.index] = leaf.changed(digest=digest)
        whole = replace(bundle, manifest=replace(bundle.manifest, leaves=tuple(leaves)))
        names = [SharedLeaf.of(leaves[leaf.index]) for leaf, _ in asked]
        answers = self._store.held(run, names, durability=durability)
        with self._lock:
            for (leaf, record), is_held in zip(asked, answers, strict=True):
                record.note(leaf.nbytes, is_held=is_held)
        held = [leaf.index for (leaf, _), is_held in zip(asked, answers, strict=True) if is_held]
        return whole, with_shared(whole, held) if held else whole

    def _remember(self, samples: Any) -> None:
        with self._lock:
            for sample in samples:
                self._samples[sample] = None
                self._samples.move_to_end(sample)
            while len(self._samples) > _MOST_LEAVES:
                self._samples.popitem(last=False)


def _sample(leaf: Leaf, payload: Payload) -> tuple[object, ...]:
    return leaf.dtype, leaf.tile_shape, sample_of(payload)
