"""The transport of bundles: through memory that a client and a server on one host share, else in the bodies of requests.

Through shared memory, a put copies the leaves into a lent segment once and sends the head of the frame alone, and a get
maps the leaves and copies nothing.
"""

from __future__ import annotations

import functools
import math
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

from residual_store import answers
from residual_store.arena import NoRoom
from residual_store.body import Body, frame_body
from residual_store.bundle import Bundle, Payload
from residual_store.copier import Copier
from residual_store.digest import DIGEST_BYTES, Copied
from residual_store.errors import DataLoss, InternalError, SegmentUnavailable
from residual_store.frame import aligned_empty, frame_head
from residual_store.key import run_of
from residual_store.neighbourhood import Neighbourhood
from residual_store.own_puts import OwnPuts
from residual_store.place import ARENA_HEADER, BlockName
from residual_store.segments import SegmentPool
from residual_store.settings import Settings
from residual_store.store import Receipt

__all__ = ["BundleTransport", "Exchange"]

_LARGE = 512 << 20
_MOST_LENT = 64
"""Each holds a descriptor, of which a client has some left for what it reads."""


class Exchange(Protocol):
    """Sends a request, again while that can help, and reads its answer; raises the error of the answer."""

    def __call__[T](
        self,
        method: str,
        path: str,
        read: Callable[[Any], T],
        *,
        query: Mapping[str, Any] | None = None,
        body: Body | None = None,
        patience: float = 0.0,
        headers: Mapping[str, str] | None = None,
    ) -> T: ...


class BundleTransport:
    """Takes bundles to one server and back; ``path`` is the bundle's on the server."""

    def __init__(self, exchange: Exchange, *, settings: Settings, segments: bool) -> None:
        self._exchange = exchange
        self._settings = settings
        self._pool = SegmentPool(total=settings.host_budget, idle_seconds=settings.segment_idle_seconds)
        self._own_puts = OwnPuts()
        self._lent: dict[int, BlockName] = {}
        self._copier = Copier()
        self._neighbourhood = Neighbourhood(
            lambda: exchange("GET", "/v1/capabilities", answers.read_json), wanted=segments
        )

    def close(self) -> None:
        """End the threads of the transport."""
        self._copier.close()

    def put(
        self,
        path: str,
        key: str,
        bundle: Bundle,
        query: Mapping[str, Any],
        moved: Callable[[int], object] = lambda nbytes: None,
    ) -> Receipt:
        """The receipt of the server, which says how the bytes came there and why not otherwise; ``moved`` as in `Store.put`."""
        try:
            receipt = self._put_segment(path, key, bundle, query, moved)
            note = self._neighbourhood.note or "the server had no free segment"
        except SegmentUnavailable as error:
            self._neighbourhood.forget()
            receipt, note = None, error.detail
        if receipt is not None:
            return receipt
        if bundle.manifest.nbytes < self._settings.mapped_bytes:
            note = f"below {self._settings.mapped_bytes} bytes one request is faster"
        body = frame_body(bundle, copier=self._copier, moved=moved)
        receipt = self._exchange("PUT", path, answers.read_receipt, query=query, body=body)
        return replace(receipt, transport_note=note)

    def _put_segment(
        self,
        path: str,
        key: str,
        bundle: Bundle,
        query: Mapping[str, Any],
        moved: Callable[[int], object],
    ) -> Receipt | None:
        """Put through a segment of the server; None if there is none to take."""
        nbytes = bundle.manifest.nbytes
        if not self._is_mapped(nbytes):
            return None
        taken = self._lent_for(bundle) or self._neighbourhood.take(
            nbytes, run_of(key), lambda: self._prepare(key, nbytes)
        )
        if taken is None:
            return None
        block, memory = taken
        head, is_filled = frame_head(bundle.manifest), memory is bundle.area
        digests = self._filling(bundle, block, memory, moved)
        sealed = functools.cache(lambda: bundle.with_digests(digests()).manifest)

        def parts() -> Iterator[memoryview]:
            yield memoryview(head)
            # While the bytes are copied, the server checks the request and takes the block over; it stores nothing before
            # the digests come.
            if not is_filled:
                yield memoryview(b"".join(digests()))
            # While the server stores the bundle.
            sealed()

        body = Body(len(head) + (0 if is_filled else DIGEST_BYTES * len(bundle.manifest.leaves)), parts)
        ends = time.monotonic() + (query["ttl"] if query["ttl"] is not None else math.inf)
        query = {**query, "segment": block.to_text()}
        receipt, place = self._exchange("PUT", path, answers.read_placed_receipt, query=query, body=body)
        self._neighbourhood.share(block)
        if place is not None and not bundle.manifest.shared:
            self._own_puts.note(key, sealed(), place, ends=ends)
        return receipt

    def _filling(
        self, bundle: Bundle, block: BlockName, memory: Payload, moved: Callable[[int], object]
    ) -> Callable[[], Sequence[bytes]]:
        """What has the leaves in the block and gives their digests."""
        forget, count = self._forgetting(block, bundle.manifest.nbytes), _counted(moved)

        def copied(start: int, stop: int) -> None:
            forget(start, stop)
            count(start, stop)

        # Once, even if the request is sent again: the server may have the bundle by then.
        @functools.cache
        def digests() -> Sequence[bytes]:
            if memory is bundle.area:
                taken = [leaf.digest for leaf in bundle.manifest.leaves]
            else:
                taken = bundle.copy_into(memory, copier=self._copier, copied=copied)
            moved(bundle.manifest.nbytes)
            return taken

        return digests

    def lend(self, key: str, nbytes: int) -> Payload | None:
        """The memory of an idle block of the server, if there is one to be taken without a request."""
        if not self._is_mapped(nbytes) or len(self._lent) >= _MOST_LENT:
            return None
        taken = self._neighbourhood.take_at_hand(nbytes, run_of(key))
        if taken is None:
            return None
        block, memory = taken
        self._lent[_address(memory)] = block
        weakref.finalize(memory, self._lent.pop, _address(memory), None).atexit = False
        return memory

    def _lent_for(self, bundle: Bundle) -> tuple[BlockName, Payload] | None:
        """The block that a bundle is in, if it was lent for that and the server is the same; it is named once."""
        if bundle.area is None or not bundle.is_sealed:
            return None
        block = self._lent.pop(_address(bundle.area), None)
        known = block is not None and block.arena == self._neighbourhood.arena
        return (block, bundle.area) if block is not None and known else None

    def _is_mapped(self, nbytes: int) -> bool:
        return nbytes >= max(self._settings.mapped_bytes, 1)

    def _forgetting(self, block: BlockName, nbytes: int) -> Copied:
        """What is called while a bundle is copied: a very large one must not count as memory of this process too."""
        neighbour = self._neighbourhood.neighbour
        if nbytes < _LARGE or neighbour is None or neighbour.name != block.arena:
            return lambda start, stop: None
        return neighbour.forgetting(block)

    def _prepare(self, key: str, nbytes: int) -> None:
        wanted = {"key": key, "nbytes": nbytes}
        self._exchange("POST", "/v1/segments", answers.read_nothing, query=wanted)

    def own(self, key: str, *, verify: bool) -> Bundle | None:
        """The bundle that this client has put under a key, if it is there still and in memory; no request is made."""
        put = self._own_puts.find(key)
        memory = self._neighbourhood.borrow(put.place) if put is not None else None
        if put is None or memory is None:
            self._own_puts.forget(key)
            return None
        bundle = Bundle.of_area(put.manifest, memory)
        if verify:
            bundle.verify(DataLoss)
        return bundle

    def forget(self, key: str) -> None:
        """Forget an own put that is being deleted."""
        self._own_puts.forget(key)

    def forget_all(self, prefix: str) -> None:
        """Forget the own puts whose keys start so."""
        self._own_puts.forget_all(prefix)

    def get(self, path: str, *, patience: float, verify: bool, mapped: bool = True) -> Bundle:
        """The bundle at a path, ``mapped`` if it can be; what comes in a body is always verified."""
        answer = self._get(path, patience, self._neighbourhood.arena if mapped else None)
        if isinstance(answer, Bundle):
            if answer.manifest.nbytes >= self._settings.mapped_bytes:
                # The next one of this size need not travel.
                self._neighbourhood.negotiated()
            return answer
        memory = [
            borrowed for place in answer.places if (borrowed := self._neighbourhood.borrow(place)) is not None
        ]
        if len(memory) < len(answer.places):
            if not mapped:
                raise InternalError(f"GET {path}: the server names a segment that it was not asked for")
            # The bundle was deleted, and its memory used again, after the server answered.
            return self.get(path, patience=patience, verify=verify, mapped=False)
        bundle = answer.adopt(memory)
        if verify:
            bundle.verify(DataLoss)
        return bundle

    def _get(self, path: str, patience: float, arena: str | None) -> Bundle | answers.Apart:
        read = functools.partial(answers.read_frame, settings=self._settings, allocate=self._allocate)
        headers = {} if arena is None else {ARENA_HEADER: arena}
        query = {"wait": patience}
        return self._exchange("GET", path, read, query=query, patience=patience, headers=headers)

    def _allocate(self, nbytes: int) -> Payload:
        """Recycled memory, or fresh memory beyond the budget of the pool: what the caller asked for must go somewhere."""
        try:
            return self._pool.allocate(nbytes).memory
        except NoRoom:
            return aligned_empty(nbytes)


def _address(memory: Payload) -> int:
    return int(memory.ctypes.data)


def _counted(moved: Callable[[int], object]) -> Copied:
    """What calls ``moved`` with the sum of all parts, one at a time, whichever thread has copied them."""
    lock, total = threading.Lock(), 0

    def copied(start: int, stop: int) -> None:
        nonlocal total
        with lock:
            total += stop - start
            moved(total)

    return copied
