"""A store whose puts wait at a gate, or whose calls are late or fail, as a test says."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from typing import Any

from residual_store import Bundle, Receipt
from residual_store.errors import Unreachable
from residual_store.store import Store

__all__ = ["Delaying", "Failing", "Gated"]

_SECONDS = 30


class Gated:
    """A store behind a gate: each put takes one permit, and then does what it does.

    ``begun`` has the keys of all puts in the order in which they came to the gate, and ``got`` those of all gets.
    ``instead`` is called in the place of the put of a key.
    """

    def __init__(self, store: Store, *, instead: Callable[[str], None] | None = None) -> None:
        self._store = store
        self._instead = instead
        self._permits = threading.Semaphore(0)
        self.begun: list[str] = []
        self.got: list[str] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def open(self, count: int = 1000) -> None:
        """Let so many puts pass."""
        self._permits.release(count)

    def put(self, key: str, bundle: Bundle, **terms: Any) -> Receipt:
        self.begun.append(key)
        assert self._permits.acquire(timeout=_SECONDS), f"nobody opened the gate for {key}"
        if self._instead is not None:
            self._instead(key)
        return self._store.put(key, bundle, **terms)

    def get(self, key: str, **options: Any) -> Bundle:
        self.got.append(key)
        return self._store.get(key, **options)


class Failing:
    """A store that cannot be reached by the calls whose names are in ``broken``."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self.broken: set[str] = set()

    def __getattr__(self, name: str) -> Any:
        if name in self.broken:
            return self._fail
        return getattr(self._store, name)

    def _fail(self, *_: Any, **__: Any) -> None:
        raise Unreachable("the wire is cut")


class Delaying:
    """A store that takes its time: each put and get is late by a random moment below a millisecond."""

    def __init__(self, store: Store, *, seed: int) -> None:
        self._store = store
        self._random = random.Random(seed)
        self._never = threading.Event()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def put(self, key: str, bundle: Bundle, **terms: Any) -> Receipt:
        self._never.wait(self._random.random() / 1000)
        return self._store.put(key, bundle, **terms)

    def get(self, key: str, **options: Any) -> Bundle:
        self._never.wait(self._random.random() / 1000)
        return self._store.get(key, **options)
