"""Parts in the store: kept out of sight until all of a bundle are there."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Protocol, cast

from residual_store.bundle import Bundle, Payload
from residual_store.engine.catalog import already_exists
from residual_store.engine.durable import DurableTier
from residual_store.engine.key_locks import KeyLocks
from residual_store.engine.memory import HostMemory
from residual_store.engine.programs import Programs
from residual_store.errors import AlreadyExists, InvalidManifest, NotFound
from residual_store.key import run_of
from residual_store.manifest import Manifest
from residual_store.parts import Part, attempt_of, difference, join, whole_of
from residual_store.segment import Segment
from residual_store.stat import receipt_of
from residual_store.store import Durability, IfExists, Receipt, Store, open_store

__all__ = ["Parts"]

_KEY_CHARS = 256
"""The key of a part is that of its bundle and so much more at most."""


class Shelf(Store, Protocol):
    """A store of its own for parts that wait."""

    def expire(self) -> int:
        """Remove the parts whose lease has ended, and return how many."""


class Parts:
    """Takes in the parts of bundles, and commits a bundle to its ``store`` when the last one comes.

    The store in which they wait is opened when there is need of it.
    """

    def __init__(
        self,
        store: Store,
        *,
        memory: HostMemory,
        programs: Programs,
        durable: DurableTier | None,
        clock: Callable[[], float],
    ) -> None:
        self._store = store
        self._memory = memory
        self._programs = programs
        self._root = None if durable is None else durable.root
        self._clock = clock
        self._joining = KeyLocks()
        self._opening = threading.Lock()
        self._opened: Shelf | None = None
        self.expired = 0

    def close(self) -> None:
        if self._opened is not None:
            self._opened.close()

    @property
    def _shelf(self) -> Shelf:
        with self._opening:
            if self._opened is None:
                settings = self._store.settings
                settings = replace(settings, max_key_chars=settings.max_key_chars + _KEY_CHARS)
                url = "memory://" if self._root is None else self._root.shelf_url
                self._opened = cast("Shelf", open_store(url, settings=settings, clock=self._clock))
            return self._opened

    @property
    def _used_shelf(self) -> Shelf | None:
        """The shelf if parts may wait there, of this process or left by one before it."""
        is_used = self._opened is not None or (self._root is not None and self._root.has_shelf)
        return self._shelf if is_used else None

    def put(
        self,
        key: str,
        bundle: Bundle,
        part: Part,
        *,
        durability: Durability,
        ttl: float | None,
        if_exists: IfExists,
    ) -> Receipt:
        """Take in one part; the receipt is that of the part, or of the whole bundle if that is there already.

        Raises `InvalidManifest` if the part is not one of the same bundle as the others, and says what differs.
        """
        settings = self._store.settings
        if not bundle.manifest.leaves or bundle.manifest.shared:
            raise InvalidManifest(
                "a part has a leaf that says what it is a part of, and shares no leaf with others"
            )
        whole = whole_of(bundle.array(0), settings)
        if (done := self._done(key, whole, if_exists)) is not None:
            return done
        place = _place(key, whole, part.checked())
        receipt = self._shelf.put(
            place, bundle, durability=durability, ttl=settings.part_ttl_seconds, if_exists="same"
        )
        with self._joining.of(key):
            if self._agrees(key, whole, part):
                self._join(key, whole, part.count, durability=durability, ttl=ttl, if_exists=if_exists)
        return self._told(replace(receipt, key=key), whole)

    def _told(self, receipt: Receipt, whole: Manifest) -> Receipt:
        """The receipt of a part with what it says of the program."""
        return replace(
            receipt,
            fingerprint=whole.fingerprint,
            platforms=whole.platforms,
            no_program=whole.no_program,
            has_program=self._programs.has(whole),
        )

    def _done(self, key: str, whole: Manifest, if_exists: IfExists) -> Receipt | None:
        """The receipt of a part whose bundle is there already; raises `AlreadyExists` for another bundle."""
        # It may be deleted at any moment, and then this part waits for the others anew.
        with contextlib.suppress(NotFound):
            if self._is_there(key, whole):
                stat, found = self._store.stat(key), self._store.manifest(key)
                return self._told(receipt_of(stat, found, existed=True, has_program=False, seconds={}), whole)
        if if_exists == "error":
            with contextlib.suppress(NotFound):
                self._store.stat(key)
                raise already_exists(key)
        return None

    def _agrees(self, key: str, whole: Manifest, part: Part) -> bool:
        """Whether all parts are there; raises `InvalidManifest`, and lets go of this part, if it differs from another."""
        there = 0
        for other in range(part.count):
            sibling = Part(index=other, count=part.count)
            place = _place(key, whole, sibling)
            with contextlib.suppress(NotFound):
                text = difference(whole, whole_of(self._shelf.get_leaf(place, 0), self._store.settings))
                if text is not None:
                    self._forget(_place(key, whole, part))
                    raise InvalidManifest(
                        f"part {part} of {key!r} is of another bundle than part {sibling}: {text}; "
                        "every process must offload the same VJP object"
                    )
                there += 1
        return there == part.count

    def _join(
        self,
        key: str,
        whole: Manifest,
        count: int,
        *,
        durability: Durability,
        ttl: float | None,
        if_exists: IfExists,
    ) -> None:
        places = [_place(key, whole, Part(index=index, count=count)) for index in range(count)]
        segments: list[Segment] = []

        def allocate(nbytes: int) -> Payload:
            segments.append(self._memory.allocate(nbytes, run=run_of(key)))
            return segments[-1].memory

        try:
            parts = [self._shelf.get(place) for place in places]
        except NotFound:
            # Another process that has this root open was faster.
            return
        try:
            bundle = join(parts, self._store.settings, allocate)
            bundle = replace(bundle, place=segments[-1].place)
            self._store.put(key, bundle, durability=durability, ttl=ttl, if_exists=if_exists)
        except InvalidManifest:
            self._forget(*places)
            raise
        except AlreadyExists:
            # Perhaps another process that has this root open was joining the same parts.
            if not self._is_there(key, whole):
                self._forget(*places)
                raise
        self._forget(*places)

    def _is_there(self, key: str, whole: Manifest) -> bool:
        try:
            found = attempt_of(self._store.manifest(key))
        except NotFound:
            return False
        return found is not None and found == attempt_of(whole)

    def _forget(self, *places: str) -> None:
        for place in places:
            with contextlib.suppress(NotFound):
                self._shelf.delete(place)

    def forget_below(self, prefix: str) -> None:
        """Let go of the parts of all bundles whose key starts with ``prefix``."""
        if (shelf := self._used_shelf) is not None:
            shelf.delete_prefix(prefix)

    def expire(self) -> int:
        """Remove the parts whose lease has ended, and return how many."""
        count = shelf.expire() if (shelf := self._used_shelf) is not None else 0
        self.expired += count
        return count


def _place(key: str, whole: Manifest, part: Part) -> str:
    """The key of a part on the shelf; parts of two offloads never meet there."""
    return f"{key}/{attempt_of(whole) or 'unnamed'}/{part.index}-of-{part.count}"
