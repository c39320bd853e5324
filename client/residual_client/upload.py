"""An upload: one bundle on its way into the store, and what has become of it."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from typing import Literal

from residual_client.motion import Motion
from residual_store.bundle import Bundle
from residual_store.errors import NotFound, ResidualStoreError, TransferStalled
from residual_store.parts import Part
from residual_store.store import Receipt

__all__ = ["Progress", "State", "Upload", "again"]

type State = Literal["queued", "sending", "stored", "failed", "withdrawn"]
type Progress = Callable[[int, int], object]
type Put = Callable[[Bundle, Callable[[int], object]], Receipt]

_logger = logging.getLogger(__name__)


class Upload:
    """One bundle between `Client.offload` and the store.

    A ``queued`` or ``sending`` one is not ``stored`` yet; a ``failed`` one will not be, and a ``withdrawn`` one was deleted
    before.
    ``nbytes`` is the memory that its bytes hold as long as it is pending.
    With a ``part`` it is that part of the bundle, and other processes have the others.
    ``encode`` makes the bundle, and is called once; ``put`` stores it.
    Attributes change with the lock of ``motion`` held.
    """

    def __init__(
        self,
        key: str,
        *,
        named: bool,
        nbytes: int,
        encode: Callable[[], Bundle],
        put: Put,
        motion: Motion,
        part: Part | None = None,
        progress: Progress | None = None,
    ) -> None:
        self.key, self.named, self.nbytes, self.part = key, named, nbytes, part
        self.state: State = "queued"
        self.receipt: Receipt | None = None
        self.error: BaseException | None = None
        self.is_told = False
        """Whether somebody was told that it failed."""
        self.is_doomed = False
        """Whether it is to be deleted as soon as it is stored."""
        self.was_given_up = False
        """Whether somebody was told that it stalled, and may do without it."""
        self._moved, self._total, self._moved_at = 0, nbytes, 0.0
        self._encode: Callable[[], Bundle] | None = encode
        self._put: Put | None = put
        self._encoded: Bundle | BaseException | None = None
        self._encoding = threading.Lock()
        self._motion = motion
        self._progress = progress

    def __repr__(self) -> str:
        return f"<{self.state} upload of {self.key!r}>"

    @property
    def pending(self) -> bool:
        """Whether it may still be stored."""
        return self.state in ("queued", "sending")

    # What the thread of the transfer does

    def bundle(self) -> Bundle | None:
        """The bundle in the memory of this process; None when it is not pending any more.

        Raises `LeafUnavailable` for a leaf that did not reach the host.
        """
        with self._encoding:
            encoded, encode = self._encoded, self._encode
            if encoded is None and encode is not None:
                encoded = _outcome(encode)
                with self._motion.changed:
                    self._encoded = encoded if self.pending else None
        if isinstance(encoded, BaseException):
            raise again(encoded)
        return encoded

    def send(self) -> Receipt:
        """Put the bundle; raises whatever comes in the way."""
        bundle, put = self.bundle(), self._put
        assert bundle is not None
        assert put is not None
        self._total = bundle.manifest.nbytes
        self._note(0)
        receipt = put(bundle, self._note)
        self._note(self._total)
        return receipt

    def end(
        self, state: State, *, receipt: Receipt | None = None, error: BaseException | None = None
    ) -> None:
        """Note how it ended, and let go of its bytes; with the lock held."""
        self.state, self.receipt = state, receipt
        self.error = None if error is None else _about(self.key, error)
        self._encode = self._put = self._encoded = None
        self._motion.tell()

    def close_progress(self) -> None:
        """Tell a progress bar that there will be no more."""
        progress, self._progress = self._progress, None
        with self._no_harm():
            getattr(progress, "close", lambda: None)()

    def _note(self, moved: int) -> None:
        self._moved, self._moved_at = moved, time.monotonic()
        self._motion.at = self._moved_at
        if self._progress is not None:
            with self._no_harm():
                self._progress(moved, self._total)

    @contextlib.contextmanager
    def _no_harm(self) -> Iterator[None]:
        """Let no error of a progress callback reach the transfer."""
        try:
            yield
        except Exception:
            self._progress = None
            _logger.exception("the progress callback of %r failed and is called no more", self.key)

    # What others want to know

    def wait(self) -> Receipt:
        """The receipt, once the bundle is stored.

        Raises what went wrong, `NotFound` if it was deleted before, or `TransferStalled`.
        """
        self._motion.check_process()
        with self._motion.changed:
            self._motion.wait_while(lambda: self.pending, self.stalled, last=self._last_moved)
            if self.receipt is not None:
                self.was_given_up = False
                return self.receipt
            self.is_told = True
        if self.error is not None:
            raise again(self.error)
        raise NotFound(f"{self.key!r} was deleted before it was stored", key=self.key)

    def _last_moved(self) -> float:
        return self._moved_at if self.state == "sending" else self._motion.at

    def stalled(self) -> TransferStalled:
        """The error of those who wait for it in vain."""
        self.was_given_up = True
        phase = self.phase
        sent = f" ({self._moved} of {self._total} bytes)" if phase == "sending" else ""
        return TransferStalled(
            f"{self.key!r} is not stored: {phase}{sent}, and nothing moved for {self._motion.limit:g} s, the limit "
            "stall_seconds; the transfer goes on, so waiting again may help",
            key=self.key,
            phase=phase,
            limit=self._motion.limit,
        )

    @property
    def phase(self) -> str:
        """The state, or "committing" when all bytes are sent and the store has not answered."""
        return "committing" if self.state == "sending" and self._moved >= self._total else self.state


def _outcome(encode: Callable[[], Bundle]) -> Bundle | BaseException:
    try:
        return encode()
    except Exception as error:  # noqa: BLE001 - it is raised where somebody waits
        return error


def _about(key: str, error: BaseException) -> BaseException:
    """The same error, which says which bundle was not stored, and does not hold its bytes."""
    _clear_frames(error)
    if isinstance(error, ResidualStoreError):
        detail = error.detail if repr(key) in error.detail else f"{key!r} is not stored: {error.detail}"
        told = error.retold(detail, key=key).with_traceback(error.__traceback__)
        told.__cause__ = error.__cause__
        return told
    error.add_note(f"{key!r} is not stored")
    return error


def _clear_frames(error: BaseException | None) -> None:
    """Let go of what was at work when an error and its causes came up."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__


def again(error: BaseException) -> BaseException:
    """An error of another thread, to be raised in this one; one of this project anew each time, so that it collects no tracebacks."""
    if not isinstance(error, ResidualStoreError):
        return error
    fresh = error.retold(error.detail)
    fresh.__cause__ = error
    return fresh
