"""Prefetch: bundles that are fetched before they are asked for, in the order in which a backward pass wants them."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial

from residual_client.handle import Handle
from residual_client.motion import Motion
from residual_client.workers import Workers
from residual_store.bundle import Bundle
from residual_store.errors import TransferStalled

__all__ = ["Prefetch"]

_logger = logging.getLogger(__name__)


@dataclass(eq=False)
class _Fetch:
    """One bundle on its way from the store; ``handle`` is dead when nobody can want it any more."""

    handle: weakref.ref[Handle]
    nbytes: int
    state: str = "queued"
    bundle: Bundle | None = None


class Prefetch:
    """Holds fetched bundles of at most ``most`` bytes, each until its restore.

    ``get`` takes a bundle from the store.
    Only a handle is served from here, and only with the very bytes that it names: a key may mean another bundle by now.
    """

    def __init__(self, workers: Workers, *, motion: Motion, get: Callable[[str], Bundle], most: int) -> None:
        self._workers = workers
        self._motion = motion
        self._get = get
        self._most = most
        self._arrived: weakref.WeakValueDictionary[int, Handle] = weakref.WeakValueDictionary()
        self._held: dict[str, _Fetch] = {}

    def arrived(self, handle: Handle) -> None:
        """Note a handle, which may be wanted when those after it have been restored."""
        if handle.local is not None:
            self._arrived[handle.local.number] = handle

    def want(self, handles: Iterable[Handle], sizes: Callable[[Handle], int]) -> None:
        """Fetch these in the background, in their order, as far as there is room; ``sizes`` says how large each is."""
        for handle in handles:
            nbytes = sizes(handle)
            with self._motion.changed:
                self._drop_dead()
                if handle.key in self._held:
                    continue
                if sum(fetch.nbytes for fetch in self._held.values()) + nbytes > self._most:
                    return
                fetch = self._held[handle.key] = _Fetch(weakref.ref(handle), nbytes)
            self._workers.submit(partial(self._run, handle.key, fetch))

    def before(self, handle: Handle) -> list[Handle]:
        """The handles that arrived before this one, the newest first, but those that were restored or are not stored yet."""
        if handle.local is None or not self._most:
            return []
        number = handle.local.number
        self._arrived.pop(number, None)
        earlier = sorted((one for one in list(self._arrived.items()) if one[0] < number), reverse=True)
        return [one for _, one in earlier if one.state == "stored"]

    def _run(self, key: str, fetch: _Fetch) -> None:
        with self._motion.changed:
            if self._held.get(key) is not fetch or fetch.handle() is None:
                return
            fetch.state = "fetching"
        bundle = None
        try:
            bundle = self._get(key)
        except Exception as error:  # noqa: BLE001 - such as no memory
            # The restore asks again, and raises what then comes in the way.
            _logger.debug("%r was not prefetched: %s", key, error)
        with self._motion.changed:
            fetch.bundle, fetch.state = bundle, "done"
            if bundle is None and self._held.get(key) is fetch:
                del self._held[key]
            self._motion.tell()

    def take(self, handle: Handle) -> Bundle | None:
        """The bundle of a handle, if it is here or on its way; it is not kept any longer."""
        with self._motion.changed:
            fetch = self._held.get(handle.key)
            if fetch is None or fetch.handle() is not handle:
                return None
            self._motion.wait_while(lambda: fetch.state == "fetching", partial(self._stalled, handle.key))
            if self._held.get(handle.key) is fetch:
                del self._held[handle.key]
            bundle = fetch.bundle
        if bundle is None or not handle.stands_for(bundle.manifest):
            return None
        return bundle

    def drop(self, key: str) -> None:
        """Let go of a bundle that is deleted or replaced."""
        with self._motion.changed:
            self._held.pop(key, None)

    def clear(self) -> None:
        """Let go of everything."""
        with self._motion.changed:
            self._held.clear()

    def _drop_dead(self) -> None:
        for key in [key for key, fetch in self._held.items() if fetch.handle() is None]:
            del self._held[key]

    def _stalled(self, key: str) -> TransferStalled:
        limit = self._motion.limit
        return TransferStalled(
            f"{key!r} is not here: fetching, and nothing moved for {limit:g} s, the limit stall_seconds",
            key=key,
            phase="fetching",
            limit=limit,
        )
