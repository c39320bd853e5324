"""Uploads: what a client has taken and not stored yet."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections import deque
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from functools import partial

from residual_client.farewell import Farewell
from residual_client.motion import Motion
from residual_client.room import Room
from residual_client.upload import State, Upload, again
from residual_client.workers import Workers
from residual_store.errors import NotFound, TransferStalled
from residual_store.store import Receipt

__all__ = ["Uploads"]

_logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Before:
    """What must be done before an upload begins: others of its key, and deletions, which make room in the store."""

    uploads: tuple[Upload, ...]
    deletions: tuple[str, ...]

    def is_done(self, deleting: Collection[str]) -> bool:
        return not any(one.pending for one in self.uploads) and set(self.deletions).isdisjoint(deleting)


class Uploads:
    """Sends uploads in the order in which they come, a few at a time, and two of one key never at once.

    ``delete`` deletes a bundle of the store.
    """

    def __init__(
        self,
        workers: Workers,
        room: Room,
        *,
        motion: Motion,
        delete: Callable[[str], None],
        farewell: Farewell,
    ) -> None:
        self._workers = workers
        self._room = room
        self._motion = motion
        self._lock: threading.Condition = motion.changed
        self._starting = threading.Lock()
        self._delete = delete
        self._farewell = farewell
        self._pending: dict[str, list[Upload]] = {}
        self._failed: dict[str, Upload] = {}
        # Failed ones whose key was taken for another: only flush and close tell of them.
        self._superseded: list[Upload] = []
        self._deleting: list[str] = []
        # Handles die at any moment, in any thread, so what they leave is only noted, and taken in at the next call.
        self._dead: deque[Upload] = deque()

    # Taking

    @contextlib.contextmanager
    def room(self, key: str, nbytes: int) -> Iterator[None]:
        """Room for an upload of that size, as `Room.take` gives it; given back if the block does not end well."""
        with self._lock:
            self._forget_dead()
            self._room.take(key, nbytes)
        try:
            yield
        except BaseException:
            with self._lock:
                self._room.give(nbytes)
            raise

    def start(self, upload: Upload) -> None:
        """Send an upload, for which there is room, in another thread."""
        # In one step for each: an upload waits for those before it, which must not come behind it to the workers.
        with self._starting:
            with self._lock:
                before = _Before(tuple(self._pending.get(upload.key, ())), tuple(self._deleting))
                self._pending.setdefault(upload.key, []).append(upload)
                self._supersede(upload.key)
                self._farewell.expect(upload)
            run = partial(self._run, upload, before)
            is_taken = self._workers.take(run)
        if not is_taken:
            run()

    def _run(self, upload: Upload, before: _Before) -> None:
        with self._lock:
            # Other threads have all of it already, so this ends.
            self._lock.wait_for(lambda: before.is_done(self._deleting))
            self._forget_dead()
            if not upload.pending:
                return
            upload.state = "sending"
            self._motion.tell()
        receipt, error = None, None
        try:
            receipt = upload.send()
        except BaseException as caught:  # noqa: BLE001 - it is raised where somebody waits
            error = caught
        with self._lock:
            self._leave(upload, "failed" if error else "stored", receipt=receipt, error=error)
            if doomed := upload.is_doomed and error is None:
                self._deleting.append(upload.key)
        upload.close_progress()
        if doomed:
            self._remove(upload.key)

    def _leave(
        self,
        upload: Upload,
        state: State,
        *,
        receipt: Receipt | None = None,
        error: BaseException | None = None,
    ) -> None:
        """Note that an upload is pending no more; with the lock held."""
        self._pending[upload.key].remove(upload)
        if not self._pending[upload.key]:
            del self._pending[upload.key]
        if state == "failed" and not upload.is_doomed:
            self._supersede(upload.key)
            self._failed[upload.key] = upload
        else:
            self._farewell.release(upload)
        upload.end(state, receipt=receipt, error=error)
        self._room.give(upload.nbytes)

    def _supersede(self, key: str) -> None:
        """Let the failed upload of a key be that no more, but be told of; with the lock held."""
        failed = self._failed.pop(key, None)
        if failed is not None and failed.is_told:
            self._farewell.release(failed)
        elif failed is not None:
            self._superseded.append(failed)

    # Letting go

    def forget(self, upload: Upload) -> None:
        """Nobody can restore it any more; for finalizers, which must neither wait nor talk to a server."""
        self._dead.append(upload)

    def sweep(self) -> None:
        """Withdraw or delete what was forgotten; that happens in other threads."""
        if self._dead:
            with self._lock:
                self._forget_dead()

    def _forget_dead(self) -> None:
        while self._dead:
            upload = self._dead.popleft()
            if upload.state == "queued":
                self._leave(upload, "withdrawn")
            elif upload.state == "stored" and not upload.is_doomed:
                self._deleting.append(upload.key)
                self._workers.submit(partial(self._remove, upload.key))
            elif self._failed.get(upload.key) is upload:
                del self._failed[upload.key]
            upload.is_doomed = True

    def _remove(self, key: str) -> None:
        try:
            self._delete(key)
        except NotFound:
            pass
        except Exception as error:  # noqa: BLE001 - whatever it is, those who wait for the deletion go on
            _logger.warning("%r is not deleted, and stays until its lease ends: %r", key, error)
        with self._lock:
            self._deleting.remove(key)
            self._motion.tell()

    def withdraw(self, key: str, only: Upload | None = None) -> None:
        """Have no upload of a key any more, or not that ``only`` one: what has not begun never will, and what has is waited for.

        Raises `TransferStalled`.
        """
        with self._lock:
            for upload in self._withdrawn(key, only):
                if upload.state == "queued":
                    self._leave(upload, "withdrawn")
            self._motion.wait_while(
                lambda: self._withdrawn(key, only), lambda: self._withdrawn(key, only)[0].stalled()
            )
            failed = self._failed.get(key) if only is None else only
            self._told([failed] if failed is not None and failed.state == "failed" else [])

    def _withdrawn(self, key: str, only: Upload | None) -> list[Upload]:
        return [upload for upload in self._pending.get(key, ()) if only in (None, upload)]

    # Waiting

    def settle(self, key: str) -> None:
        """Wait until the last upload of a key is stored; raises why it is not, if nobody was told yet."""
        with self._lock:
            pending = self._pending.get(key)
            upload = pending[-1] if pending else self._failed.get(key)
        if upload is not None and not upload.is_told:
            upload.wait()

    def flush(self) -> None:
        """Wait until nothing is pending; raises the first of the failures since the last flush, with the others as notes.

        Raises `TransferStalled`, which names the first that is pending.
        """
        with self._lock:
            self._forget_dead()
            self._wait_for_all()
            failed = self._told([*self._superseded, *self._failed.values()])
            self._superseded.clear()
        _raise(failed)

    def finish(self) -> None:
        """The same for the last time: scratch bundles that have not begun are withdrawn, and failures are raised that nobody was told of."""
        with self._lock:
            self._forget_dead()
            for upload in [one for ones in self._pending.values() for one in ones]:
                if upload.state == "queued" and not upload.named:
                    self._leave(upload, "withdrawn")
            self._wait_for_all()
            every = [*self._superseded, *self._failed.values()]
            failed = self._told([upload for upload in every if not upload.is_told])
        _raise(failed)

    def _wait_for_all(self) -> None:
        self._motion.wait_while(lambda: self._pending or self._deleting, self._stalled)

    def _stalled(self) -> TransferStalled:
        # Of each of them, because somebody may do without any.
        stalled = [upload.stalled() for uploads in self._pending.values() for upload in uploads]
        if stalled:
            return stalled[0]
        key, limit = self._deleting[0], self._motion.limit
        return TransferStalled(
            f"{key!r} is not deleted, and nothing moved for {limit:g} s, the limit stall_seconds",
            key=key,
            phase="deleting",
            limit=limit,
        )

    def _told(self, failed: list[Upload]) -> list[Upload]:
        """The same uploads, which nobody needs to be told of any more; with the lock held."""
        for upload in failed:
            if self._failed.get(upload.key) is upload:
                del self._failed[upload.key]
            self._farewell.release(upload)
            upload.is_told = True
        return failed


def _raise(failed: list[Upload]) -> None:
    errors = [(upload.key, again(upload.error)) for upload in failed if upload.error is not None]
    if not errors:
        return
    (_, first), *others = errors
    for key, error in others:
        first.add_note(f"not stored either: {key!r}: {type(error).__name__}: {error}")
    raise first
