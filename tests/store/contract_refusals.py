"""What every store refuses, and with which error, as tests."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest

from residual_store import Receipt, Store
from residual_store.errors import InvalidKey, InvalidOption, NotFound, ResidualStoreError
from tests.store.bundles import noise
from tests.store.contract import StoreContract

__all__ = ["RefusalContract"]

_BAD_KEYS = [
    *("", "run", "run/", "/a", "/run/a", "run//a", "run/a/", "run/../a", "../a", "run/..", "run/."),
    *("run/a b", "run/\0", "run/é", "run/\udc80", "run/a\n", "run/.hidden", "-run/a", "run/a?b", "run/a#b"),
    *(
        "run/%2e%2e",
        "run/a\\b",
        "run/~",
        "run/@1",
        "run/" + "a" * 129,
        "run" + "/a" * 300,
        "run/" + "a" * 5000,
    ),
    *("run/leaves", "run/a/manifest", "run/touch/b", "run/prefetch"),
]

type Call = Callable[[Store, str], object]

_MISSING: dict[str, Call] = {
    "get": lambda store, key: store.get(key),
    "get_leaf": lambda store, key: store.get_leaf(key, 0),
    "manifest": lambda store, key: store.manifest(key),
    "stat": lambda store, key: store.stat(key),
    "delete": lambda store, key: store.delete(key),
    "touch": lambda store, key: store.touch(key, ttl=5),
    "prefetch": lambda store, key: store.prefetch(key),
}

_REFUSED: dict[str, tuple[type[ResidualStoreError], Call]] = {
    "durability": (InvalidOption, lambda store, run: _put(store, run, durability="tape")),
    "if_exists": (InvalidOption, lambda store, run: _put(store, run, if_exists="maybe")),
    "ttl of zero": (InvalidOption, lambda store, run: _put(store, run, ttl=0)),
    "ttl below zero": (InvalidOption, lambda store, run: _put(store, run, ttl=-1)),
    "ttl not a number": (InvalidOption, lambda store, run: _put(store, run, ttl=float("nan"))),
    "ttl without end": (InvalidOption, lambda store, run: _put(store, run, ttl=float("inf"))),
    "ttl of a million years": (InvalidOption, lambda store, run: _put(store, run, ttl=3e13)),
    "no entries": (InvalidOption, lambda store, run: store.list(limit=0)),
    "too many entries": (InvalidOption, lambda store, run: store.list(limit=10**6)),
    "prefix": (InvalidKey, lambda store, run: store.list(prefix="../")),
    "delete everything": (InvalidOption, lambda store, run: store.delete_prefix("")),
    "delete by a bad prefix": (InvalidKey, lambda store, run: store.delete_prefix("run/..")),
    "program of no name": (NotFound, lambda store, run: store.get_program("0" * 64)),
    "program of a bad name": (InvalidOption, lambda store, run: store.get_program("F" * 64)),
    "program of a short name": (InvalidOption, lambda store, run: store.put_program("ab", b"")),
    "program elsewhere": (InvalidOption, lambda store, run: store.get_program("../" + "a" * 61)),
}


def _put(store: Store, run: str, **options: Any) -> Receipt:
    return store.put(f"{run}/refused", noise(10), **options)


class RefusalContract(StoreContract):
    """Refusals have one class and one code over every implementation, and leave nothing behind."""

    @pytest.mark.parametrize("call", _MISSING)
    def test_what_is_not_there_is_not_found(self, store: Store, run: str, call: str) -> None:
        """Every method that needs a bundle raises NotFound with the key."""
        with pytest.raises(NotFound) as caught:
            _MISSING[call](store, f"{run}/absent")
        assert (type(caught.value), caught.value.fields["key"]) == (NotFound, f"{run}/absent")

    @pytest.mark.parametrize("call", _MISSING)
    def test_what_is_no_key_is_refused(self, store: Store, call: str) -> None:
        """Every method refuses every key that breaks the grammar, before it does anything."""
        for key in _BAD_KEYS:
            with pytest.raises(InvalidKey):
                _MISSING[call](store, key)

    def test_nothing_is_put_under_a_bad_key(self, store: Store) -> None:
        """A put refuses every key that breaks the grammar."""
        for key in _BAD_KEYS:
            with pytest.raises(InvalidKey):
                store.put(key, noise(1))

    @pytest.mark.parametrize("case", _REFUSED)
    def test_wrong_options_are_refused(self, store: Store, run: str, case: str) -> None:
        """Each has one class and code over every implementation, and nothing is stored."""
        kind, call = _REFUSED[case]
        with pytest.raises(kind) as caught:
            call(store, run)
        assert (type(caught.value), caught.value.code) == (kind, kind.code)
        assert store.list(prefix=f"{run}/").entries == ()

    @pytest.mark.parametrize("index", [-1, 2, 10**6])
    def test_a_leaf_that_is_not_there(self, store: Store, run: str, index: int) -> None:
        """An index outside the bundle is NotFound, below zero as well."""
        store.put(f"{run}/a", noise(1, 2))
        with pytest.raises(NotFound) as caught:
            store.get_leaf(f"{run}/a", index)
        assert type(caught.value) is NotFound

    def test_text_that_is_no_text_is_refused(self, store: Store) -> None:
        """A lone surrogate in `after` is refused as such, like one in a key, and not by the library below."""
        with pytest.raises(ResidualStoreError):
            store.list(after="run/\udc80")

    @pytest.mark.parametrize("wait", [float("nan"), -1.0])
    def test_a_wait_that_is_no_time_does_not_hang(self, store: Store, run: str, wait: float) -> None:
        """A get that waits for no length of time ends at once, with an error of this project."""
        ended: list[object] = []

        def get() -> None:
            try:
                ended.append(store.get(f"{run}/a", wait=wait))
            except BaseException as error:  # noqa: BLE001 - the thread tells whatever happened
                ended.append(type(error))

        waiting = threading.Thread(target=get, daemon=True)
        waiting.start()
        waiting.join(3)
        assert ended in ([InvalidOption], [NotFound])

    @pytest.mark.parametrize("key", ["run/a.__lock", "run.__lock/a", "run/a.__lock/b"])
    def test_a_name_that_tensorstore_keeps_for_itself_is_no_key(self, store: Store, key: str) -> None:
        """tensorstore's files refuse names that end like its locks, so they are refused everywhere."""
        with pytest.raises(InvalidKey):
            store.put(key, noise(1))
        with pytest.raises(InvalidKey):
            store.get(key)
