"""The durable tier: what a dead writer left goes, what a living one is writing stays, and a full disk costs nothing."""

from __future__ import annotations

import contextlib
import shutil
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest
import tensorstore as ts

from residual_store import Bundle, Settings
from residual_store.engine.local import LocalStore
from residual_store.errors import InternalError, NotFound
from residual_store.store import IfExists
from tests.servers import until
from tests.store.bundles import assert_equal, filled, noise
from tests.store.roots import flip_a_bit, generations, leftovers


def _at(root: Path) -> LocalStore:
    return LocalStore.at(root.as_uri(), settings=Settings())


@contextlib.contextmanager
def _settled(root: Path) -> Iterator[LocalStore]:
    """A store that has looked at everything that it found."""
    with _at(root) as store:
        until(lambda: store.usage().unindexed == 0)
        yield store


def _stale_writer(root: Path) -> str:
    """Leave the lock file that a killed process leaves; nobody holds it."""
    (root / "writers").mkdir(parents=True, exist_ok=True)
    (root / "writers" / "00dead00dead").touch()
    return "00dead00dead"


# What a crash leaves


@pytest.mark.parametrize(
    "names", [[], ["d/"], ["d/0123"], ["d/0123", "d/4567.__lock"], ["manifest.ocdbt.__lock"]]
)
def test_what_a_dead_writer_left_is_removed(tmp_path: Path, names: list[str]) -> None:
    """A generation without its database goes at the next start, whatever lies in it, and takes its directories along."""
    bundle = noise(1000)
    with _at(tmp_path) as store:
        store.put("run/kept", bundle)
    left = tmp_path / f"bundles/run/a/deeper/@18ec8e50-{_stale_writer(tmp_path)}"
    (left / "d").mkdir(parents=True)
    for name in names:
        if not name.endswith("/"):
            (left / name).write_bytes(b"half")
    if not names:
        (left / "d").rmdir()
    with _settled(tmp_path) as store:
        assert leftovers(tmp_path, {"run/kept"}) == []
        assert not (tmp_path / "bundles/run/a").exists()
        assert_equal(store.get("run/kept"), bundle)


def test_what_a_living_writer_writes_is_left_alone(tmp_path: Path) -> None:
    """Another process that opens the root does not touch what a living one has begun and not committed."""
    with _at(tmp_path) as store:
        (writer,) = (path.name for path in (tmp_path / "writers").iterdir() if path.name != "door")
        begun = tmp_path / f"bundles/run/a/@18ec8e50-{writer}/d/0123"
        begun.parent.mkdir(parents=True)
        begun.write_bytes(b"half")
        script = "import sys; from residual_store import open_store; open_store(sys.argv[1]).close()"
        subprocess.run([sys.executable, "-c", script, tmp_path.as_uri()], check=True)
        assert begun.read_bytes() == b"half"
        store.put("run/b", noise(10))
    with _settled(tmp_path):
        assert not begun.exists()


def test_a_delete_that_was_cut_off_is_a_delete(tmp_path: Path) -> None:
    """A delete removes the database first; if a crash keeps it from the rest, the next start finishes it."""
    with _at(tmp_path) as store:
        store.put("run/a", noise(1000))
        store.put("run/b", noise(1000))
    _stale_writer(tmp_path)
    (database,) = (tmp_path / "bundles/run/a").rglob("manifest.ocdbt")
    database.unlink()
    with sqlite3.connect(tmp_path / "index.sqlite") as index:
        index.execute("DELETE FROM bundles WHERE key = 'run/a'")
    index.close()
    with _settled(tmp_path) as store:
        with pytest.raises(NotFound):
            store.get("run/a")
        assert leftovers(tmp_path, {"run/b"}) == []


def test_a_replacement_that_was_cut_off_leaves_one_generation(tmp_path: Path) -> None:
    """After a crash between the commit of a replacement and the removal of the old bundle, the new one is there alone."""
    with _at(tmp_path) as store:
        store.put("run/a", filled(1))
        (old,) = generations(tmp_path)["run/a"]
        shutil.copytree(old, tmp_path / "kept")
        store.put("run/a", filled(2), if_exists="replace")
    (tmp_path / "kept").rename(old)
    with sqlite3.connect(tmp_path / "index.sqlite") as index:
        index.execute("UPDATE bundles SET generation = ?", (old.name,))
    index.close()
    with _settled(tmp_path) as store:
        assert store.get("run/a").array(0)[1] == 2
        assert leftovers(tmp_path, {"run/a"}) == []


@pytest.mark.parametrize("replaces", [False, True])
def test_a_database_without_its_record_is_no_bundle(tmp_path: Path, replaces: bool) -> None:
    """tensorstore makes an empty database before it commits to it; a writer killed between has committed nothing.

    The bundle that was to be replaced is still there and whole, or there is none, and what was begun is removed.
    """
    bundle, writer = filled(1), _stale_writer(tmp_path)
    with _at(tmp_path) as store:
        store.put("run/b", noise(10))
        if replaces:
            store.put("run/a", bundle)
    _stale_writer(tmp_path)
    folder = tmp_path / f"bundles/run/a/@ffffffffffffffff-{writer}"
    folder.mkdir(parents=True)
    base = {"driver": "file", "path": f"{folder}/"}
    ts.KvStore.open({"driver": "ocdbt", "base": base}).result().write("another key", b"begun").result()
    assert (folder / "manifest.ocdbt").is_file()
    with _settled(tmp_path) as store:
        if replaces:
            assert_equal(store.get("run/a"), bundle)
        else:
            with pytest.raises(NotFound):
                store.get("run/a")
        assert leftovers(tmp_path, {"run/b"} | ({"run/a"} if replaces else set())) == []
        store.put("run/a", noise(5), if_exists="replace")
        assert store.get("run/a").manifest.nbytes == 5


@pytest.mark.parametrize("if_exists", ["error", "same", "replace"])
@pytest.mark.parametrize("sizes", [[3 << 20], [5, 70_000]], ids=["an array", "packed"])
def test_the_same_put_mends_what_is_damaged(tmp_path: Path, sizes: list[int], if_exists: IfExists) -> None:
    """A put is acknowledged for bytes that can be read, also where a bundle stands already that says it is the same."""
    bundle = Bundle.of_arrays({str(size): noise(size).array(0) for size in sizes})
    with _at(tmp_path) as store:
        store.put("run/a", bundle)
        assert store.put("run/a", bundle, if_exists=if_exists).existed
        flip_a_bit(tmp_path, "run/a")
        receipt = store.put("run/a", bundle, if_exists=if_exists)
        assert (receipt.existed, receipt.durability) == (False, "disk")
        assert_equal(store.get("run/a"), bundle)


def test_the_deletion_of_a_prefix_ends_while_puts_go_on(tmp_path: Path) -> None:
    """What was there before is gone, and it does not go on for as long as somebody puts."""
    with _at(tmp_path) as store, ThreadPoolExecutor(1) as thread:
        for number in range(120):
            store.put(f"run/{number:03}", noise(8))
        deleting = thread.submit(store.delete_prefix, "run/")
        puts = 0
        while not deleting.done():
            store.put(f"run/{puts % 100:03}/again", noise(8), if_exists="replace")
            puts += 1
            assert puts < 20_000
        assert deleting.result() >= 120
        assert all(entry.key.endswith("/again") for entry in store.list(limit=500).entries)


def test_parts_that_cannot_be_opened_hold_up_no_bundle(tmp_path: Path) -> None:
    """The store says so when it is to end their leases, and leaves neither a descriptor nor the lock of a writer behind."""
    with _at(tmp_path) as store:
        store.put("run/a", bundle := noise(10))
    (tmp_path / "parts" / "index.sqlite").mkdir(parents=True)
    before = psutil.Process().num_fds()
    for _ in range(3):
        with _at(tmp_path) as store:
            assert_equal(store.get("run/a"), bundle)
            with pytest.raises(InternalError):
                store.expire()
    assert psutil.Process().num_fds() == before
    assert [path.name for path in (tmp_path / "writers").iterdir()] == ["door"]
