"""Several stores at one root, in one process or in several: each sees what the others have committed, and only that."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from residual_store import Settings
from residual_store.engine.local import LocalStore
from residual_store.errors import NotFound
from tests.store.bundles import filled, noise
from tests.store.roots import generations, leftovers


def _at(root: Path) -> LocalStore:
    return LocalStore.at(root.as_uri(), settings=Settings())


def test_what_another_store_replaced_is_not_served_from_a_copy(tmp_path: Path) -> None:
    """A prefetched copy is worth nothing once another process has replaced the bundle."""
    with _at(tmp_path) as one, _at(tmp_path) as other:
        one.put("run/a", filled(1))
        one.prefetch("run/a")
        other.put("run/a", filled(2), if_exists="replace")
        assert one.get("run/a").array(0)[1] == 2
        assert one.get_leaf("run/a", 1)[1] == 2
        assert one.manifest("run/a") == other.manifest("run/a")
        other.delete("run/a")
        with pytest.raises(NotFound):
            one.get("run/a")


def test_what_another_store_commits_is_seen(tmp_path: Path) -> None:
    """A get that waits finds what another process has put, and so does a listing."""
    with _at(tmp_path) as one, _at(tmp_path) as other, ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(lambda: one.get("run/a", wait=20))
        other.put("run/a", filled(3))
        assert waiting.result(10).array(0)[1] == 3
        assert one.list().entries == other.list().entries


def test_two_stores_replace_one_bundle(tmp_path: Path) -> None:
    """Every put succeeds, every get meets one whole bundle, and one generation is left, as with two processes."""
    together = threading.Barrier(2)

    def work(number: int) -> None:
        with _at(tmp_path) as store:
            together.wait()
            for step in range(15):
                store.put("run/a", filled(number * 100 + step, size=200_000), if_exists="replace")
                got = store.get("run/a")
                assert len({int(got.array(index)[1]) for index in range(4)}) == 1

    with ThreadPoolExecutor(2) as threads:
        list(threads.map(work, range(2)))
    with _at(tmp_path):
        assert leftovers(tmp_path, {"run/a"}) == []


@pytest.mark.parametrize("way", ["delete", "expire", "put in memory"])
def test_what_another_store_is_writing_stays(tmp_path: Path, way: str) -> None:
    """A put that another process has begun is not undone because the bundle before it is deleted, ends or is replaced."""
    now = 1e6
    settings = Settings()
    with (
        _at(tmp_path) as one,
        LocalStore.at(tmp_path.as_uri(), settings=settings, clock=lambda: now) as other,
    ):
        other.put("run/a", filled(1), ttl=60)
        assert one._durable is not None
        begun = tmp_path / f"bundles/run/a/@{time.time_ns():016x}-{one._durable._writers.own}"
        (begun / "d").mkdir(parents=True)
        match way:
            case "delete":
                other.delete("run/a")
            case "expire":
                now += 61
                other.expire()
            case _:
                other.put("run/a", filled(2), durability="host", if_exists="replace")
        assert generations(tmp_path) == {"run/a": [begun]}


def test_opening_a_root_forgets_nothing_that_others_write(tmp_path: Path) -> None:
    """Stores that open and close while another one puts leave every bundle in the listing, and every file in place."""
    done = threading.Event()

    def open_and_close() -> int:
        rounds = 0
        while not done.is_set():
            _at(tmp_path).close()
            rounds += 1
        return rounds

    with _at(tmp_path) as store, ThreadPoolExecutor(2) as threads:
        opening = [threads.submit(open_and_close) for _ in range(2)]
        try:
            for number in range(60):
                store.put(f"run/{number}", noise(10))
                store.put("run/same", filled(number), if_exists="replace")
                assert store.get("run/same").array(0)[1] == number
        finally:
            done.set()
        assert all(one.result() >= 3 for one in opening)
        assert len(store.list(limit=500).entries) == 61
        assert len(generations(tmp_path)) == 61


def test_of_two_touches_the_longer_one_is_kept_without_the_index(tmp_path: Path) -> None:
    """Two stores that have one root open touch a bundle at the same time, again and again."""
    bundle = noise(10)
    with _at(tmp_path) as one, _at(tmp_path) as other, ThreadPoolExecutor(2) as threads:
        for number in range(20):
            one.put(f"run/{number}", bundle, ttl=50)
            line = threading.Barrier(2)

            def touch(store: LocalStore, ttl: float, key: str, line: threading.Barrier = line) -> None:
                line.wait(30)
                store.touch(key, ttl=ttl)

            begun = [threads.submit(touch, *asked, f"run/{number}") for asked in ((one, 500), (other, 900))]
            for touching in begun:
                touching.result(30)
    for file in tmp_path.glob("index.sqlite*"):
        file.unlink()
    with _at(tmp_path) as store:
        left = [store.stat(f"run/{number}").expires_at for number in range(20)]
    assert all(expires_at is not None and expires_at > time.time() + 600 for expires_at in left)
