"""The index is a cache: deleted, damaged or of another version, it is made anew from the store."""

from __future__ import annotations

import contextlib
import json
import random
import shutil
import sqlite3
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from residual_store import Settings, Stat
from residual_store.engine.index import Entry, Index
from residual_store.engine.local import LocalStore
from residual_store.errors import DataLoss, NotFound, StoreBroken
from tests.store.bundles import assert_equal, noise
from tests.store.roots import data_files
from tests.store.test_store import Clock

PAGE = 4096


def _at(root: Path) -> LocalStore:
    return LocalStore.at(root.as_uri(), settings=Settings())


def _listing(store: LocalStore) -> tuple[Stat, ...]:
    return store.list(limit=500).entries


def _delete(path: Path) -> None:
    for part in path.parent.glob(path.name + "*"):
        part.unlink()


def _zero(path: Path) -> None:
    path.write_bytes(bytes(path.stat().st_size))


def _truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: PAGE + 100])


def _empty(path: Path) -> None:
    path.write_bytes(b"")


def _spoil_all_but_the_head(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:PAGE].ljust(path.stat().st_size, b"\xa5"))


def _other_version(path: Path) -> None:
    with sqlite3.connect(path) as database:
        database.execute("PRAGMA user_version = 99")
    database.close()


def _other_table(path: Path) -> None:
    path.unlink()
    with sqlite3.connect(path) as database:
        database.execute("CREATE TABLE bundles (something TEXT)")
    database.close()


@pytest.mark.parametrize(
    "damage", [_delete, _zero, _truncate, _empty, _spoil_all_but_the_head, _other_version, _other_table]
)
def test_a_lost_index_is_made_anew(tmp_path: Path, damage: Callable[[Path], None]) -> None:
    """The listing is the same as before, to the last field, and the bundles can be got, replaced and deleted."""
    bundles = {f"run/{number}": noise(100 + number, seed=number) for number in range(40)}
    with _at(tmp_path) as store:
        for key, bundle in bundles.items():
            store.put(key, bundle)
        before = _listing(store)
    damage(tmp_path / "index.sqlite")
    with _at(tmp_path) as store:
        assert _listing(store) == before
        for key, bundle in bundles.items():
            assert_equal(store.get(key), bundle)
        store.put("run/0", noise(5), if_exists="replace")
        store.delete("run/1")
        assert len(_listing(store)) == 39


def test_a_page_of_garbage_in_the_index_is_no_obstacle(tmp_path: Path) -> None:
    """Whichever page of the file is garbage, the store opens and the listing is the same."""
    with _at(tmp_path) as store:
        for number in range(150):
            store.put(f"run/{number}", noise(10, seed=number))
        before = _listing(store)
    path, chance = tmp_path / "index.sqlite", random.Random(3)
    whole = path.read_bytes()
    assert len(whole) >= 4 * PAGE
    for start in range(0, len(whole), PAGE):
        for part in tmp_path.glob("index.sqlite-*"):
            part.unlink()
        path.write_bytes(whole[:start] + chance.randbytes(PAGE) + whole[start + PAGE :])
        with _at(tmp_path) as store:
            assert _listing(store) == before, start // PAGE


def test_an_index_that_is_damaged_while_it_is_used(tmp_path: Path) -> None:
    """No caller sees an error of sqlite: a bundle comes or the store says that it is broken; a restart mends it."""
    bundle = noise(10)
    with _at(tmp_path) as store:
        for number in range(60):
            store.put(f"run/{number}", bundle)
        with sqlite3.connect(tmp_path / "index.sqlite") as database:
            database.execute("PRAGMA wal_checkpoint(TRUNCATE)")
            database.execute("DROP TABLE bundles")
        database.close()
        with contextlib.suppress(StoreBroken):
            assert_equal(store.get("run/7"), bundle)
        with contextlib.suppress(StoreBroken):
            assert len(_listing(store)) == 60
    with _at(tmp_path) as store:
        assert len(_listing(store)) == 60
        assert_equal(store.get("run/7"), bundle)


def test_a_lease_survives_a_restart_and_not_a_lost_index(tmp_path: Path) -> None:
    """A touched lease is kept over a restart; without the index the lease of the put starts anew, which is longer."""
    with _at(tmp_path) as store:
        store.put("run/a", noise(10), ttl=1000)
        touched = store.touch("run/a", ttl=50).expires_at
    with _at(tmp_path) as store:
        assert store.stat("run/a").expires_at == touched
    _delete(tmp_path / "index.sqlite")
    with _at(tmp_path) as store:
        found = store.stat("run/a").expires_at
        assert touched is not None
        assert found is not None
        assert touched + 900 < found


@pytest.mark.parametrize("kind", ["file", "objects"])
def test_a_longer_lease_is_kept_without_the_index(tmp_path: Path, kind: str) -> None:
    """On an object store every start is one; a lease that was made shorter since ends later, and never too early."""
    base = {"driver": "file", "path": f"{tmp_path}/"}
    objects = json.dumps({"driver": "kvstack", "layers": [{"base": base}]})
    url, clock = tmp_path.as_uri() if kind == "file" else objects, Clock()
    touches: dict[str, tuple[float | None, ...]] = {
        "run/ended": (None,),
        "run/longer": (500, 20),
        "run/both": (500, None, 20),
        "run/shorter": (20,),
        "run/none": (),
    }
    bundle = noise(3 << 20)
    with LocalStore.at(url, settings=Settings(), clock=clock) as store:
        for key, ttls in touches.items():
            store.put(key, bundle, ttl=50)
            for ttl in ttls:
                expires_at = store.touch(key, ttl=ttl).expires_at
                assert expires_at == (None if ttl is None else clock() + ttl)
    _delete(tmp_path / "index.sqlite")
    with LocalStore.at(url, settings=Settings(), clock=clock) as store:
        left = {key: store.stat(key).expires_at for key in touches}
        assert left == {
            "run/ended": None,
            "run/longer": clock() + 500,
            "run/both": None,
            "run/shorter": clock() + 50,
            "run/none": clock() + 50,
        }
        for key in touches:
            assert_equal(store.get(key), bundle)


def test_a_touch_of_a_damaged_bundle_says_so(tmp_path: Path) -> None:
    """And one of a bundle that another process has deleted writes nothing."""
    with _at(tmp_path) as store:
        for key in ("run/damaged", "run/gone"):
            store.put(key, noise(10), ttl=50)
        for file in data_files(tmp_path, "run/damaged"):
            file.write_bytes(b"x" * file.stat().st_size)
        with pytest.raises(DataLoss):
            store.touch("run/damaged", ttl=500)
        shutil.rmtree(tmp_path / "bundles" / "run" / "gone")
        with contextlib.suppress(NotFound):
            store.touch("run/gone", ttl=500)
        assert not (tmp_path / "bundles" / "run" / "gone").exists()


def _entry(key: str, *, expires_at: float | None = None) -> Entry:
    stat = Stat(
        key=key,
        tier="durable",
        durability="disk",
        fingerprint=None,
        leaves=3,
        nbytes=10,
        array_nbytes=20,
        arrived=1.5,
        expires_at=expires_at,
        digest="d",
        content="c",
    )
    return Entry(stat=stat, generation="g", paths="0 (h)")


def test_rows_come_back_as_they_went_in(tmp_path: Path) -> None:
    """What is set is what is got, in a file and after it was opened again."""
    index = Index(tmp_path / "index.sqlite", tier="durable")
    index.set(_entry("run/a", expires_at=7.25))
    index.close()
    index = Index(tmp_path / "index.sqlite", tier="durable")
    assert index.get("run/a") == _entry("run/a", expires_at=7.25)
    assert index.get("run/b") is None
    index.close()


def test_a_page_leaves_out_what_has_expired() -> None:
    """Rows whose lease has ended do not count towards the limit of a page."""
    index = Index(None, tier="host")
    for number in range(10):
        index.set(_entry(f"run/{number}", expires_at=5.0 if number % 2 else None))
    page = index.page(prefix="run/", after="run/2", limit=3, now=5.0)
    assert [stat.key for stat in page] == ["run/4", "run/6", "run/8"]
    assert index.expired(4.9) == []
    assert sorted(index.expired(5.0)) == [f"run/{number}" for number in (1, 3, 5, 7, 9)]
    assert [(run.run, run.bundles, run.nbytes) for run in index.usage()] == [("run", 10, 100)]
    index.close()


def test_an_index_that_another_one_is_making_is_waited_for(tmp_path: Path) -> None:
    """Two stores may open a new root at once: who comes second does not take a file in use for a damaged one."""
    path = tmp_path / "index.sqlite"
    with (
        contextlib.closing(sqlite3.connect(path, isolation_level=None)) as other,
        ThreadPoolExecutor(1) as threads,
    ):
        other.execute("BEGIN IMMEDIATE")
        opening = threads.submit(Index, path, tier="durable")
        with pytest.raises(TimeoutError):
            opening.result(0.3)
        other.execute("PRAGMA user_version = 0")
        other.execute("COMMIT")
        with contextlib.closing(opening.result(20)) as index:
            index.set(_entry("run/a"))
            assert other.execute("SELECT key FROM bundles").fetchall() == [("run/a",)]


def _interrupted(index: Index) -> None:
    with index.batch():
        index.remove("run/a")
        index.set(_entry("run/b"))
        raise KeyboardInterrupt


@pytest.mark.parametrize("on_disk", [True, False])
def test_a_batch_that_fails_changes_nothing(tmp_path: Path, on_disk: bool) -> None:
    """What a full disk or an interrupt leaves half done is undone, and the next batch works."""
    with contextlib.closing(Index(tmp_path / "index.sqlite" if on_disk else None, tier="durable")) as index:
        index.set(_entry("run/a"))
        with pytest.raises(KeyboardInterrupt):
            _interrupted(index)
        assert index.get("run/a") is not None
        assert index.get("run/b") is None
        with index.batch():
            index.remove("run/a")
        assert index.get("run/a") is None
