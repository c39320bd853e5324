"""Room: the memory that a client may hold for bundles which are not stored yet."""

from __future__ import annotations

from functools import partial
from typing import Literal

from residual_client.motion import Motion
from residual_store.errors import Busy, InvalidOption, TransferStalled
from residual_store.settings import Settings

__all__ = ["Room", "WhenFull"]

type WhenFull = Literal["wait", "raise"]


class Room:
    """Bytes out of `max_inflight_bytes`; all methods are called with the lock of ``motion`` held.

    A bundle above the limit is taken when there is no other.
    Raises `InvalidOption` for another ``when_full``.
    """

    def __init__(self, motion: Motion, settings: Settings, *, when_full: WhenFull) -> None:
        if when_full not in ("wait", "raise"):
            raise InvalidOption(f"when_full is {when_full!r}; it is 'wait' or 'raise'", option="when_full")
        self._motion = motion
        self._settings = settings
        self._when_full = when_full
        self._taken = 0

    def take(self, key: str, nbytes: int) -> None:
        """Take room for a bundle.

        Where there is none, it raises `Busy` or waits, as ``when_full`` says, and raises `TransferStalled` when nothing moves.
        """
        if self._when_full == "raise" and self._is_full(nbytes):
            raise self._busy(key, nbytes)
        self._motion.wait_while(lambda: self._is_full(nbytes), partial(self._stalled, key))
        self._taken += nbytes

    def give(self, nbytes: int) -> None:
        """Give room back."""
        self._taken -= nbytes
        self._motion.tell()

    def _is_full(self, nbytes: int) -> bool:
        return self._taken > 0 and self._taken + nbytes > self._settings.max_inflight_bytes

    @property
    def _state(self) -> str:
        limit = self._settings.max_inflight_bytes
        return f"{self._taken} of {limit} bytes (max_inflight_bytes) wait to be stored"

    def _busy(self, key: str, nbytes: int) -> Busy:
        return Busy(
            f"{key!r} has {nbytes} bytes, and {self._state}; wait for a handle, or connect with when_full='wait'",
            key=key,
            needed_bytes=nbytes,
            limit=self._settings.max_inflight_bytes,
            retry_after=self._settings.retry_after_seconds,
        )

    def _stalled(self, key: str) -> TransferStalled:
        limit = self._motion.limit
        return TransferStalled(
            f"{key!r} is not taken: waiting for room, {self._state}, and nothing moved for {limit:g} s, "
            "the limit stall_seconds",
            key=key,
            phase="waiting for room",
            limit=limit,
        )
