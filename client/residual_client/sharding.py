"""Sharding: arrays over the devices of several processes, of which each process stores what is its own."""

from __future__ import annotations

import contextlib
import secrets
import threading
import time
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from residual_client.handle import Handle
from residual_client.jax_compat import agreed, counted
from residual_client.known_offloads import KnownOffloads, Offload
from residual_client.shards import block_start, data_of, distinct_shards
from residual_client.transfer import Residual
from residual_store.blocks import Start
from residual_store.bundle import Bundle
from residual_store.errors import InvalidOption, LeafUnavailable, NotFound
from residual_store.manifest import UserValue
from residual_store.parts import ATTEMPT, Part, attempt_of
from residual_store.settings import Settings
from residual_store.store import Store

__all__ = ["Attempts", "Spread", "own_blocks", "spread_of", "with_attempt"]

_REMEMBERED_KEYS = 65_536
_LOOK_AGAIN_SECONDS = 0.02


@dataclass(frozen=True, kw_only=True)
class Spread:
    """The processes that hold the leaves of one VJP object together, and which of them this one is."""

    processes: tuple[int, ...]
    part: Part


def spread_of(residuals: Sequence[Residual], key: str | None) -> Spread | None:
    """Who holds the leaves together; None if this process has them all.

    Raises `LeafUnavailable` for a scratch bundle, or if this process has nothing of a leaf.
    """
    spread = [residual for residual in residuals if _is_spread(residual.value)]
    if not spread:
        return None
    path, sharding = spread[0].path, spread[0].value.sharding
    if key is None:
        raise LeafUnavailable(
            f"{path} lies on devices of several processes ({sharding}); pass a key to offload, the same in each of "
            "them, under which their parts can meet",
            leaf=path,
        )
    processes = sorted({device.process_index for one in spread for device in one.value.sharding.device_set})
    own = jax.process_index()
    if own not in processes:
        raise LeafUnavailable(f"{path} lies on devices of other processes only ({sharding})", leaf=path)
    part = Part(index=processes.index(own), count=len(processes)).checked()
    return Spread(processes=tuple(processes), part=part)


def _is_spread(value: Any) -> bool:
    is_there = isinstance(value, jax.Array) and not isinstance(value, jax.core.Tracer)
    return is_there and not value.is_fully_addressable


def own_blocks(value: Any) -> Iterator[tuple[Start, Any]]:
    """The blocks of a leaf that this process stores, and where they start.

    Of a block that lies on several devices, the process with the lowest index among theirs stores one copy.
    A leaf that is not spread is a piece of every process, so that the store sees whether it is equal in all.
    """
    data = data_of(value)
    if not _is_spread(data):
        yield from distinct_shards(data).items()
        return
    owners: dict[Start, int] = {}
    for device, index in data.sharding.devices_indices_map(data.shape).items():
        start = block_start(index)
        owners[start] = min(owners.get(start, device.process_index), device.process_index)
    own = jax.process_index()
    yield from ((start, block) for start, block in distinct_shards(data).items() if owners[start] == own)


def with_attempt(
    user: Mapping[str, UserValue] | None, spread: Spread | None
) -> Mapping[str, UserValue] | None:
    """The labels of a bundle, with one for the name of the attempt if there are parts; raises `InvalidOption` for it."""
    if ATTEMPT in (user or {}):
        raise InvalidOption(f"the label {ATTEMPT!r} is not yours to give; choose another name", option="user")
    return user if spread is None else {**(user or {}), ATTEMPT: ""}


class Attempts:
    """Names for the offloads of one client, equal in all processes that make them together, and never used again.

    The processes agree once on a random text, and each counts how often a key was offloaded, repetitions after a failure aside; so
    parts of a run that was started anew, or of an earlier step under the same key, never become one bundle with newer ones.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._lock = threading.Lock()
        self._tokens: dict[tuple[int, ...], str] = {}
        self._counts: OrderedDict[str, int] = OrderedDict()
        self._floor = 0
        self._offloads = KnownOffloads()
        self._numbers: dict[str, int] = {}
        self._whole: OrderedDict[str, int] = OrderedDict()

    @contextlib.contextmanager
    def begun(self, key: str, spread: Spread | None, residuals: Sequence[Residual]) -> Iterator[Offload]:
        """One offload of a key, which is lost if the block does not end well; it has a name if there is a ``spread``.

        Raises `LeafUnavailable` if the first process does not answer, or if an earlier offload of the key was lost.
        """
        if spread is None:
            yield Offload()
            return
        values = [residual.value for residual in residuals]
        with self._lock:
            offload = self._offloads.lost(key, values)
            if offload is None:
                offload = self._offloads.note(key, self._next(key, spread), values)
            offload.upload, offload.is_being_taken = None, True
        try:
            yield offload
        finally:
            offload.is_being_taken = False

    def _next(self, key: str, spread: Spread) -> str:
        """The name of the next offload of a key; with the lock held."""
        token = self._tokens.get(spread.processes) or self._agreed(spread)
        self._tokens[spread.processes] = token
        count = self._counts.pop(key, self._floor) + 1
        self._counts[key] = count
        if len(self._counts) > _REMEMBERED_KEYS:
            # A key that comes again later must not get a number that it had.
            self._floor = max(self._floor, self._counts.popitem(last=False)[1])
        return f"{token}-{count}"

    def _agreed(self, spread: Spread) -> str:
        name = "residual-store/" + "-".join(map(str, spread.processes))
        # Once, however often this fails: the others look for this number.
        client = self._numbers.get(name)
        if client is None:
            client = self._numbers[name] = counted(f"{name}/clients-of/{jax.process_index()}")
        proposal = secrets.token_hex(8) if spread.part.index == 0 else None
        seconds = self._settings.max_wait_seconds
        try:
            return agreed(f"{name}/{client}", proposal, seconds=seconds)
        except RuntimeError as error:
            raise LeafUnavailable(
                f"process {spread.processes[0]} has not offloaded anything within {seconds:g} s: {error}; "
                "every process must offload the same VJP objects"
            ) from error

    def get(self, store: Store, source: Handle | str, *, wait: float) -> Bundle:
        """The bundle of a handle or key; for a handle whose other parts may still be on their way, as soon as they are there.

        What they are about to replace is not it.
        """
        key, digest = (source.key, source.digest) if isinstance(source, Handle) else (source, "")
        token, _, count = digest.partition("-")
        if token not in self._tokens.values() or self._whole.get(key, 0) >= int(count):
            return store.get(key, wait=wait)
        patience = max(wait, self._settings.part_ttl_seconds)
        deadline = time.monotonic() + patience
        while True:
            try:
                bundle = store.get(key, wait=max(deadline - time.monotonic(), 0.0))
            except NotFound as error:
                raise NotFound(
                    f"this process has stored its part of {key!r}, and those of the others did not come within "
                    f"{patience:g} s, or the bundle was deleted",
                    key=key,
                ) from error
            theirs, _, number = (attempt_of(bundle.manifest) or "").partition("-")
            if theirs == token and int(number) >= int(count):
                self._note_whole(key, int(number))
                return bundle
            if time.monotonic() >= deadline:
                return bundle
            _wait_for_another(store, key, bundle, deadline)

    def _note_whole(self, key: str, count: int) -> None:
        """Once all parts were there, nobody needs to wait for them again, as after a deletion."""
        with self._lock:
            self._whole[key] = count
            if len(self._whole) > _REMEMBERED_KEYS:
                self._whole.popitem(last=False)


def _wait_for_another(store: Store, key: str, bundle: Bundle, deadline: float) -> None:
    """Wait until another offload than that of the ``bundle`` stands under the key, or none; what asks for that is small."""
    known = attempt_of(bundle.manifest)
    with contextlib.suppress(NotFound):
        while time.monotonic() < deadline and attempt_of(store.manifest(key)) == known:
            time.sleep(_LOOK_AGAIN_SECONDS)
