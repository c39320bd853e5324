"""A root without its index: the store answers at once and rightly while the index is made anew behind."""

from __future__ import annotations

import shutil
import sqlite3
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from residual_store import Settings, Stat
from residual_store.engine.durable import DurableTier
from residual_store.engine.local import LocalStore
from residual_store.engine.root import Root
from residual_store.errors import NotFound
from tests.servers import until
from tests.store.bundles import filled, noise
from tests.store.roots import generations, leftovers

KEYS = [f"run{number % 3}/{number:02}" for number in range(60)]


def _at(root: Path) -> LocalStore:
    return LocalStore.at(root.as_uri(), settings=Settings())


def _held_up(root: Path, *, clock: Callable[[], float] = lambda: 1e9) -> LocalStore:
    """A store that reads the records that its index does not know only when it is asked for them."""
    settings = Settings()
    durable = DurableTier(Root(root.as_uri()), settings=settings, clock=clock, in_background=False)
    return LocalStore(root.as_uri(), settings=settings, durable=durable, clock=clock)


def _listing(store: LocalStore, prefix: str = "", limit: int = 7) -> list[Stat]:
    found: list[Stat] = []
    after: str | None = ""
    while after is not None:
        page = store.list(prefix=prefix, after=after, limit=limit)
        found += page.entries
        after = page.next
        assert after is None or len(page.entries) == limit
    return found


@pytest.fixture
def before(tmp_path: Path) -> Iterator[list[Stat]]:
    """The listing of a root whose index was deleted since."""
    with _at(tmp_path) as store:
        for number, key in enumerate(KEYS):
            store.put(key, noise(100, seed=number))
        before = list(store.list(limit=100).entries)
    for part in tmp_path.glob("index.sqlite*"):
        part.unlink()
    assert len(before) == len(KEYS)
    return before


def test_everything_is_listed_at_once(tmp_path: Path, before: list[Stat]) -> None:
    """With nothing read behind, pages of all sizes have every bundle, and a page reads no more than it needs."""
    with _held_up(tmp_path) as store:
        assert store.usage().unindexed == 60
        assert [stat.key for stat in store.list(prefix="run1/", limit=5).entries] == KEYS[1:15:3]
        assert store.usage().unindexed == 54
        assert _listing(store, "run2/") == [stat for stat in before if stat.key.startswith("run2/")]
        assert _listing(store) == before
        usage = store.usage()
        assert (usage.unindexed, [run.bundles for run in usage.runs]) == (0, [20, 20, 20])
    with _held_up(tmp_path) as store:
        assert store.usage().unindexed == 0
        assert _listing(store) == before


def test_one_bundle_is_found_at_once(tmp_path: Path, before: list[Stat]) -> None:
    """A get, a stat, a put and a deletion of a bundle that was not read yet do what they always do."""
    with _held_up(tmp_path) as store:
        assert store.get(KEYS[9]).array(0).tobytes() == noise(100, seed=9).array(0).tobytes()
        assert store.stat(KEYS[8]) == next(stat for stat in before if stat.key == KEYS[8])
        assert store.put(KEYS[7], store.get(KEYS[7])).existed
        store.put(KEYS[6], filled(6), if_exists="replace")
        store.delete(KEYS[5])
        with pytest.raises(NotFound):
            store.stat(KEYS[5])
        assert {stat.key for stat in _listing(store)} == set(KEYS) - {KEYS[5]}
        assert store.get(KEYS[6]).array(0)[1] == 6


def test_a_run_is_deleted_whole(tmp_path: Path, before: list[Stat]) -> None:
    """Deleting by prefix reaches what was not read yet, and nothing of it comes back."""
    with _held_up(tmp_path) as store:
        assert store.delete_prefix("run1/") == 20
        assert _listing(store) == [stat for stat in before if not stat.key.startswith("run1/")]
    with _at(tmp_path) as store:
        assert len(_listing(store)) == 40
    assert len(generations(tmp_path)) == 40


def test_what_was_never_committed_makes_no_page_shorter(tmp_path: Path, before: list[Stat]) -> None:
    """Generations that a dead writer left, and bundles that are gone, are skipped, and what follows them is listed."""
    for number in range(30):
        (tmp_path / f"bundles/run0/{number:02}-left/@18ec8e50-00dead00dead/d").mkdir(parents=True)
    with _held_up(tmp_path) as store:
        assert store.usage().unindexed == 90
        assert _listing(store) == before
        assert leftovers(tmp_path, set(KEYS)) == []


def test_the_index_is_made_behind(tmp_path: Path, before: list[Stat]) -> None:
    """Without a request all records are read, what a dead writer left is removed, and the listing is as before."""
    (tmp_path / "bundles/run0/left/@18ec8e50-00dead00dead/d").mkdir(parents=True)
    with _at(tmp_path) as store:
        until(lambda: store.usage().unindexed == 0)
        assert leftovers(tmp_path, set(KEYS)) == []
        assert _listing(store) == before


def test_puts_and_deletions_meanwhile(tmp_path: Path, before: list[Stat]) -> None:
    """Two stores replace and delete bundles while both make the index; in the end it says what is on the disk."""

    def work(store: LocalStore, keys: list[str], number: int) -> None:
        for key in keys[::3]:
            store.delete(key)
        for key in keys[1::3]:
            store.put(key, filled(number), if_exists="replace")
            assert store.get(key).array(0)[1] == number
        for key in keys[::3]:
            with pytest.raises(NotFound):
                store.stat(key)

    with _at(tmp_path) as one, _at(tmp_path) as other, ThreadPoolExecutor(4) as threads:
        parts = [(one, KEYS[:15], 1), (one, KEYS[15:30], 2), (other, KEYS[30:45], 3), (other, KEYS[45:], 4)]
        list(threads.map(lambda part: work(*part), parts))
        until(lambda: one.usage().unindexed + other.usage().unindexed == 0)
        expected = {key for _, keys, _ in parts for place, key in enumerate(keys) if place % 3}
        assert {stat.key for stat in _listing(one)} == {stat.key for stat in _listing(other)} == expected
        assert set(generations(tmp_path)) == expected
        for _, keys, number in parts:
            assert all(other.get(key).array(0)[1] == number for key in keys[1::3])


def _forget(root: Path) -> None:
    with sqlite3.connect(root / "index.sqlite") as index:
        index.execute("DELETE FROM bundles")
    index.close()


class Moment:
    """A clock that does something once, at the moment when the store has read a record and not noted it yet."""

    def __init__(self) -> None:
        self.then: Callable[[], object] = lambda: None

    def __call__(self) -> float:
        then, self.then = self.then, lambda: None
        then()
        return 1e9


def test_a_deletion_between_reading_and_noting(tmp_path: Path) -> None:
    """What another store deletes at the worst moment is not in the index afterwards."""
    moment = Moment()
    with _held_up(tmp_path) as other:
        other.put("run/a", filled(1), ttl=100)
        with _held_up(tmp_path, clock=moment) as store:
            _forget(tmp_path)
            moment.then = lambda: other.delete("run/a")
            with pytest.raises(NotFound):
                store.stat("run/a")
            assert _listing(store) == _listing(other) == []


def test_a_replacement_between_reading_and_noting(tmp_path: Path) -> None:
    """What another store puts and touches at the worst moment is what the index says, lease included."""
    moment = Moment()

    def replace() -> None:
        other.put("run/a", filled(2), ttl=100, if_exists="replace")
        other.touch("run/a", ttl=5000)

    with _held_up(tmp_path) as other:
        other.put("run/a", filled(1), ttl=100)
        with _held_up(tmp_path, clock=moment) as store:
            _forget(tmp_path)
            moment.then = replace
            assert store.stat("run/a") == other.stat("run/a")
            assert store.stat("run/a").expires_at == 1e9 + 5000
            assert store.get("run/a").array(0)[1] == 2
            assert _listing(store) == _listing(other) == [other.stat("run/a")]


def test_an_old_index(tmp_path: Path) -> None:
    """An index of yesterday is not believed: what has replaced a bundle since is told of, and an ended lease ends nothing."""
    now = [1e9]
    with _held_up(tmp_path, clock=lambda: now[0]) as store:
        for key in ("run/a", "run/b", "run/c"):
            store.put(key, filled(1), ttl=100)
    shutil.copy(tmp_path / "index.sqlite", tmp_path.with_suffix(".old"))
    with _held_up(tmp_path, clock=lambda: now[0]) as store:
        for key in ("run/a", "run/b", "run/c"):
            store.put(key, filled(2), if_exists="replace")
        stats = store.list().entries
    shutil.copy(tmp_path.with_suffix(".old"), tmp_path / "index.sqlite")
    now[0] += 200
    with _held_up(tmp_path, clock=lambda: now[0]) as store:
        assert store.usage().unindexed == 3
        assert store.stat("run/a") == stats[0]
        assert store.expire() == 0
        assert store.list().entries == stats
        assert store.get("run/c").array(0)[1] == 2
