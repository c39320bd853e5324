"""A neighbour: a server on the same host, whose shared arena this process has mapped."""

from __future__ import annotations

import mmap
import os
import stat
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from residual_store.arena import PAGE
from residual_store.bundle import Payload
from residual_store.place import Place
from residual_store.range_lock import lock_shared
from residual_store.shared_arena import ARENA, BASE, NONCE, TICKET_BYTES, is_arena_name

__all__ = ["Neighbour", "NotShared"]

_MOST_BORROWED = 256


class NotShared(Exception):
    """Why this process and a server share no memory, in one line."""


class Neighbour:
    """The client's end of a `residual_store.shared_arena.SharedArena`.

    ``described`` is what the server says of its arena.
    What it says is believed only of a directory in memory that belongs to this user and nobody else can enter: a server
    must not make this process map, or write to, any other file.

    Raises `NotShared`.
    """

    def __init__(self, described: Mapping[str, Any] | None, *, base: Path = BASE) -> None:
        if described is None:
            raise NotShared("the server shares no memory")
        directory = Path(str(described["directory"]))
        if directory.parent != base or not is_arena_name(directory.name):
            raise NotShared(f"the server's segments are not in {base}")
        self.name = directory.name
        self._borrowed: set[int] = set()
        try:
            _check_owner(directory)
            if (directory / NONCE).read_bytes().hex() != described["nonce"]:
                raise NotShared("the server is on another host, or in a container with a /dev/shm of its own")
            self._path = directory / ARENA
            self._own, self._views = _map(self._path)
        except FileNotFoundError:
            raise NotShared(
                "the server is on another host, or in a container with a /dev/shm of its own"
            ) from None
        except OSError as error:
            raise NotShared(f"the server's memory cannot be mapped: {error.strerror}") from None

    def borrow(self, place: Place, *, writable: bool = False) -> Payload | None:
        """The bytes of a segment, which stays what it is until their last view dies; None if it is something else by now.

        They are read-only by the page tables unless ``writable``.
        """
        start = place.offset - PAGE
        memory = self._own if writable else self._views
        if place.arena != self.name or start < 0 or place.offset + place.nbytes > len(memory):
            return None
        if len(self._borrowed) >= _MOST_BORROWED:
            return None
        held = self._hold(start)
        if held is None:
            return None
        if self._views[start : start + TICKET_BYTES].hex() != place.ticket:
            self._let_go(held)
            return None
        view = np.frombuffer(memory, np.uint8, place.nbytes, place.offset)
        weakref.finalize(view, self._let_go, held).atexit = False
        return view

    def _hold(self, start: int) -> int | None:
        """A descriptor that holds the lock of a segment; the lock ends when it is closed."""
        try:
            descriptor = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError:
            return None
        if not lock_shared(descriptor, start):
            os.close(descriptor)
            return None
        self._borrowed.add(descriptor)
        return descriptor

    def _let_go(self, descriptor: int) -> None:
        self._borrowed.discard(descriptor)
        os.close(descriptor)


def _check_owner(directory: Path) -> None:
    found = directory.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise NotShared("the server runs as another user")


def _map(path: Path) -> tuple[mmap.mmap, mmap.mmap]:
    """The arena twice: to write to, and to read from only."""
    descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        nbytes = os.fstat(descriptor).st_size
        return mmap.mmap(descriptor, nbytes), mmap.mmap(descriptor, nbytes, prot=mmap.PROT_READ)
    finally:
        os.close(descriptor)
