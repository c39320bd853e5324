"""The depot: where residuals lie in a store between the forward and the backward of one compiled step.

All of it runs inside host callbacks, so nothing here calls JAX.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import threading
import time
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Self

import jax
import numpy as np
import numpy.typing as npt

from residual_client.host_call import Host
from residual_store.bundle import Bundle
from residual_store.dtypes import name_of
from residual_store.errors import (
    LeafUnavailable,
    NotFound,
    RequestRefused,
    ResidualStoreError,
    StoreUnavailable,
)
from residual_store.leaf import Channel, Leaf
from residual_store.manifest import Manifest
from residual_store.store import Store
from residual_store.translation import Translation

__all__ = ["Depot", "Fetch", "Place", "Stow"]

TICKET = jax.ShapeDtypeStruct((3,), np.uint32)
"""What stands for a bundle inside of a program: two halves of its number, and the position in a batch."""


@dataclass(frozen=True)
class Place:
    """Where a residual sits in its VJP object, for errors and for whoever looks into the store."""

    channel: Channel
    path: str


class Depot:
    """Bundles that one backward takes out again; safe to use from several threads.

    One whose backward never runs expires with its lease, and ``expired`` counts it.

    >>> depot = Depot(client.store, prefix="scratch/doc")
    >>> number = depot.put([np.arange(3.0)], [Place("opaque_residuals", "h")], function="layer")
    >>> depot.take(number, function="layer")
    [array([0., 1., 2.])]
    """

    def __init__(self, store: Store, *, prefix: str) -> None:
        self._store = store
        self._prefix = prefix
        self._ttl = store.settings.scratch_ttl_seconds
        self._numbers = itertools.count()
        self._waiting = OrderedDict[int, float]()
        self._lock = threading.Lock()
        self._expired = 0
        self._is_closed = False
        self._is_used = False

    def close(self) -> None:
        """Take no more bundles."""
        self._is_closed = True

    @property
    def is_used(self) -> bool:
        """Whether bundles were ever put, of which some may be left."""
        return self._is_used

    @property
    def waiting(self) -> int:
        """How many bundles wait for their backward."""
        with self._lock:
            self._forget_expired()
            return len(self._waiting)

    @property
    def expired(self) -> int:
        """How many bundles were never asked for until their lease ended."""
        with self._lock:
            self._forget_expired()
            return self._expired

    def put(self, arrays: Sequence[Host], places: Sequence[Place], *, function: str) -> int:
        """Store host arrays and return the number of their bundle; raises whatever `Store.put` raises."""
        number = next(self._numbers)
        key = self._key(number)
        if self._is_closed:
            raise RequestRefused(
                f"the client of {function} was closed; connect again, and wrap the function anew"
            )
        leaves = tuple(
            Leaf(
                index=index,
                channel=place.channel,
                path=place.path,
                dtype=name_of(array.dtype),
                shape=array.shape,
            )
            for index, (array, place) in enumerate(zip(arrays, places, strict=True))
        )
        manifest = Manifest(key=key, leaves=leaves, created=time.time(), function=function)
        bundle = Bundle.encoded(manifest, list(arrays), identities=list(range(len(arrays))))
        what = f"{places[0].path} and what comes after it ({len(places)} leaves) cannot be stored"
        self._is_used = True
        with _about(key, function, what):
            self._store.put(key, bundle, durability="host", ttl=self._ttl)
        with self._lock:
            self._forget_expired()
            self._waiting[number] = time.monotonic() + self._ttl
        return number

    def take(self, number: int, *, function: str) -> list[Host]:
        """The arrays of a bundle, which is deleted; raises `NotFound` if there is none any more."""
        key = self._key(number)
        with self._lock:
            expires = self._waiting.pop(number, None)
        with _about(key, function, "its residuals cannot be read"):
            if expires is None:
                raise NotFound(
                    "a backward has taken them already, or their lease has ended; call the forward again for "
                    "a second backward, and raise scratch_ttl_seconds above the time of a step",
                    key=key,
                )
            try:
                bundle = self._store.get(key)
            except StoreUnavailable:
                with self._lock:
                    self._waiting[number] = expires
                    self._waiting.move_to_end(number, last=False)
                raise
            # If that fails, its lease ends, or the client deletes it when it is closed.
            with contextlib.suppress(StoreUnavailable):
                self._store.delete(key)
        return [bundle.array(leaf.index) for leaf in bundle.manifest.leaves]

    def _key(self, number: int) -> str:
        return f"{self._prefix}/{number}"

    def _forget_expired(self) -> None:
        now = time.monotonic()
        while self._waiting and next(iter(self._waiting.values())) < now:
            self._waiting.popitem(last=False)
            self._expired += 1


def _about(key: str, function: str, what: str) -> Translation:
    """Name the bundle and the function in errors that JAX will show as text only."""

    def translate(error: Exception) -> None:
        if isinstance(error, ResidualStoreError):
            detail = f"{key!r} of {function}: {what}: {error.detail}"
            raise error.retold(detail, key=key) from error

    return Translation(translate)


@dataclass(frozen=True)
class Stow:
    """Puts its operands into a depot and returns a ticket for each element of the batch."""

    depot: Depot
    places: tuple[Place, ...]
    function: str
    batch: tuple[int, ...] = ()

    @property
    def results(self) -> list[jax.ShapeDtypeStruct]:
        return [jax.ShapeDtypeStruct((*self.batch, *TICKET.shape), TICKET.dtype)]

    def batched(self, size: int) -> Self:
        return replace(self, batch=(size, *self.batch))

    def __call__(self, *operands: Host) -> list[Host]:
        count = math.prod(self.batch)
        number = self.depot.put(operands, self.places, function=self.function) if count else 0
        tickets = np.empty((count, *TICKET.shape), TICKET.dtype)
        tickets[:, 0], tickets[:, 1], tickets[:, 2] = number >> 32, number & 0xFFFFFFFF, np.arange(count)
        return [tickets.reshape(*self.batch, *TICKET.shape)]


@dataclass(frozen=True)
class Fetch:
    """Takes out of a depot what its tickets stand for."""

    depot: Depot
    leaves: tuple[jax.ShapeDtypeStruct, ...]
    function: str
    batch: tuple[int, ...] = ()

    @property
    def results(self) -> list[jax.ShapeDtypeStruct]:
        return [jax.ShapeDtypeStruct((*self.batch, *leaf.shape), leaf.dtype) for leaf in self.leaves]

    def batched(self, size: int) -> Self:
        return replace(self, batch=(size, *self.batch))

    def __call__(self, *operands: Host) -> list[Host]:
        tickets = operands[0].reshape(-1, *TICKET.shape)
        numbers = {(int(high) << 32) | int(low) for high, low, _ in tickets}
        if not numbers:
            return [np.empty(result.shape, result.dtype) for result in self.results]
        if len(numbers) != 1:
            raise LeafUnavailable(
                f"one backward of {self.function} asks for the residuals of {len(numbers)} forwards at once; "
                "map over forward and backward together"
            )
        arrays = self.depot.take(numbers.pop(), function=self.function)
        return self._selected(arrays, tickets[:, 2].astype(np.intp))

    def _selected(self, arrays: Sequence[Host], positions: npt.NDArray[np.intp]) -> list[Host]:
        """What the tickets' positions in the stored batch stand for; an array without the batch has 1 in its place."""
        ranks = [array.ndim - len(leaf.shape) for array, leaf in zip(arrays, self.leaves, strict=True)]
        batch = np.broadcast_shapes(*[array.shape[:rank] for array, rank in zip(arrays, ranks, strict=True)])
        count = math.prod(batch)
        whole = np.array_equal(positions, np.arange(count))
        selected = []
        for array, leaf, result in zip(arrays, self.leaves, self.results, strict=True):
            rows = np.broadcast_to(array, (*batch, *leaf.shape)).reshape(count, *leaf.shape)
            selected.append((rows if whole else rows[positions]).reshape(result.shape))
        return selected
