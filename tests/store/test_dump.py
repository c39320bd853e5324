"""The dump of a database: all that tensorstore tells, and nothing of it stays in memory."""

from __future__ import annotations

import gc
import tracemalloc
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import tensorstore as ts

from residual_store import Settings
from residual_store.engine.dump import dump
from residual_store.engine.local import LocalStore
from tests.store.bundles import assert_equal, noise

_CONTEXT = ts.Context()


@pytest.fixture
def database(tmp_path: Path) -> ts.KvStore:
    """The folder of a database with values in its tree and beside it."""
    base = {"driver": "file", "path": f"{tmp_path}/"}
    values = ts.KvStore.open({"driver": "ocdbt", "base": base}, context=_CONTEXT).result()
    for number in range(40):
        values.write(f"key/{number}", bytes([number]) * (10 if number % 2 else 3000)).result()
    return ts.KvStore.open(base, context=_CONTEXT).result()


def test_a_dump_is_what_tensorstore_tells(database: ts.KvStore) -> None:
    """Manifest and nodes are equal to those of tensorstore, also when they are asked for again."""
    for _ in range(2):
        manifest = dump(database, None, context=_CONTEXT)
        assert manifest == ts.ocdbt.dump(database, context=_CONTEXT).result()
        node = manifest["versions"][-1]["root"]["location"]
        entries = dump(database, node, context=_CONTEXT)
        assert entries == ts.ocdbt.dump(database, node, context=_CONTEXT).result()
        assert len(entries["entries"]) == 40


def _growth(work: Callable[[], object], *, times: int) -> int:
    """Bytes that so many calls leave behind, after as many that did not count."""

    def held() -> int:
        for _ in range(times):
            work()
        gc.collect()
        return tracemalloc.get_traced_memory()[0]

    tracemalloc.start()
    try:
        held()
        before = held()
        return held() - before
    finally:
        tracemalloc.stop()


def test_a_dump_leaves_nothing_behind(database: ts.KvStore) -> None:
    """What was told of a manifest and of a node is freed with the last reference to it."""
    node = dump(database, None, context=_CONTEXT)["versions"][-1]["root"]["location"]
    for what in (None, node):
        assert _growth(partial(dump, database, what, context=_CONTEXT), times=50) < 50 * 8


def test_reading_bundles_again_and_again_takes_no_memory(tmp_path: Path) -> None:
    """A server may read from a disk for months: a get holds nothing of the database when its bundle is gone."""
    with LocalStore.at(tmp_path.as_uri(), settings=Settings()) as store:
        sent = noise(3_000_000, 300_000, 20)
        store.put("run/a", sent, durability="disk")
        assert _growth(lambda: assert_equal(store.get("run/a"), sent), times=100) < 100 * 1000
