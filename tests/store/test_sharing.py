"""Shared leaves: what the bundles of a run have in common is held once, is never missing, and does not stay for ever."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from residual_store import Bundle, Settings, Store, open_store
from residual_store.engine.local import LocalStore
from residual_store.errors import DataLoss, LeafNotHeld, NotFound
from residual_store.shared_leaf import SharedLeaf, with_shared
from residual_store.stat import digest_of_manifest
from residual_store.store import Durability
from tests.servers import Server
from tests.store.bundles import assert_equal, sharded
from tests.store.roots import data_files, flip_a_bit, generations
from tests.store.sharing_child import SETTINGS, rounds

_W = np.random.default_rng(0).random((512, 1024), dtype=np.float32)
_SHARED = SharedLeaf.of(Bundle.of_arrays({"W": _W}).sealed().manifest.leaves[0])


def _bundle(seed: int, *, size: int = 300_000) -> Bundle:
    """A bundle with the weights, something of its own, and the weights once more."""
    own = np.random.default_rng(seed).random(size, dtype=np.float32)
    return Bundle.of_arrays({"x": own, "W": _W, "the same": _W}).sealed()


def _put_two(store: Store, run: str, durability: Durability) -> Bundle:
    """Two bundles, the second without the bytes of the weights; gives it as it was before."""
    store.put(f"{run}/a", _bundle(1), durability=durability)
    assert store.held(run, [_SHARED], durability=durability) == (True,)
    second = _bundle(2)
    store.put(f"{run}/b", with_shared(second, [1]), durability=durability)
    return second


def _bytes(store: Store, run: str) -> int:
    return sum(one.nbytes for one in store.usage().runs if one.run == run)


class Clock:
    """A clock that moves when it is told to."""

    now = 1_000_000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture(params=["memory", "disk", "host"])
def local(
    request: pytest.FixtureRequest, tmp_path: Path, clock: Clock
) -> Iterator[tuple[LocalStore, Durability]]:
    """A store in this process, and the durability to put with."""
    settings = Settings()
    if request.param == "memory":
        with LocalStore.in_memory(settings=settings, clock=clock) as store:
            yield store, "host"
        return
    with LocalStore.at(tmp_path.as_uri(), settings=settings, clock=clock) as store:
        yield store, request.param


@pytest.fixture(params=["memory", "disk", "http", "segments", "http disk"])
def any_store(
    request: pytest.FixtureRequest, tmp_path: Path, memory_server: Server, disk_server: Server
) -> Iterator[tuple[Store, Durability]]:
    """A store of each kind, and the durability to put with."""
    server = disk_server if request.param == "http disk" else memory_server
    urls = {"memory": "memory://", "disk": tmp_path.as_uri()}
    options = {"segments": False} if request.param == "http" else {}
    settings = Settings(mapped_bytes=100_000)
    with open_store(urls.get(request.param, server.url), settings=settings, **options) as store:
        yield store, "disk" if "disk" in request.param else "host"
        store.delete_prefix("sharing/")


def test_nobody_sees_that_a_leaf_is_shared(any_store: tuple[Store, Durability]) -> None:
    """Bundle, leaves, manifest and digests are those of the whole bundle, and a put of that is a repetition."""
    store, durability = any_store
    sent = _put_two(store, "sharing", durability)
    assert_equal(store.get("sharing/b"), sent)
    assert_equal(store.get("sharing/b", verify=True), sent)
    assert [store.get_leaf("sharing/b", i).tobytes() for i in range(3)] == [
        sent.array(i).tobytes() for i in range(3)
    ]
    assert store.manifest("sharing/b") == sent.manifest
    assert store.stat("sharing/b").digest == digest_of_manifest(sent.manifest)
    assert store.put("sharing/b", sent, durability=durability).existed
    assert store.prefetch("sharing/b").key == "sharing/b"
    assert_equal(store.get("sharing/b"), sent)
    assert [entry.key for entry in store.list(prefix="sharing/").entries] == ["sharing/a", "sharing/b"]


def test_the_receipt_says_what_was_not_sent(any_store: tuple[Store, Durability]) -> None:
    """The bytes of the shared leaf count neither as sent nor as the bundle's own, and once for the run."""
    store, durability = any_store
    store.put("sharing/a", _bundle(1), durability=durability)
    store.held("sharing", [_SHARED], durability=durability)
    receipt = store.put("sharing/b", with_shared(_bundle(2), [1]), durability=durability)
    assert receipt.saved_bytes["shared"] == _W.nbytes
    assert receipt.nbytes == receipt.array_nbytes - 2 * _W.nbytes
    before = _bytes(store, "sharing")
    store.put("sharing/c", with_shared(_bundle(3), [1]), durability=durability)
    assert _bytes(store, "sharing") == before + receipt.nbytes
    assert store.delete_prefix("sharing/") == 3
    assert _bytes(store, "sharing") == 0


def _with_tiles(seed: int, count: int) -> Bundle:
    """A bundle with the weights as often as there are devices, in one array; the tile alone for one device."""
    own = np.random.default_rng(seed).random((400, 1000), dtype=np.float32)
    tiled = np.concatenate([_W] * count)
    return sharded({"x": (own, 2), "W": (tiled, count), "the same": (tiled, count)}).sealed()


@pytest.mark.parametrize("counts", [(1, 2, 3), (2, 1, 4), (3, 2, 2)])
def test_a_tile_is_shared_with_whoever_has_its_bytes(
    any_store: tuple[Store, Durability], counts: tuple[int, ...]
) -> None:
    """Whole or as a tile, first or later; each bundle comes back as it was put, also when the first is gone."""
    store, durability = any_store
    sent = {f"sharing/{seed}": _with_tiles(seed, count) for seed, count in enumerate(counts)}
    for (key, bundle), count in zip(sent.items(), counts, strict=True):
        is_first = key == "sharing/0"
        name = SharedLeaf.of(bundle.manifest.leaves[1])
        assert name == _SHARED
        assert store.held("sharing", [name], durability=durability) == (not is_first,)
        receipt = store.put(key, bundle if is_first else with_shared(bundle, [1]), durability=durability)
        saved = {"alias": _W.nbytes * count, "tiled": _W.nbytes * (count - 1), "shared": _W.nbytes}
        saved |= {"shared": 0} if is_first else {}
        assert receipt.saved_bytes == {name: nbytes for name, nbytes in saved.items() if nbytes}
    store.delete("sharing/0")
    for key, bundle in list(sent.items())[1:]:
        assert_equal(store.get(key, verify=True), bundle)
        assert store.manifest(key) == bundle.manifest
        assert store.stat(key).digest == digest_of_manifest(bundle.manifest)
        for index in range(3):
            assert store.get_leaf(key, index).tobytes() == bundle.array(index).tobytes()
        assert store.put(key, bundle, durability=durability).existed


def test_a_tile_is_no_leaf_of_other_content(any_store: tuple[Store, Durability]) -> None:
    """A leaf with the shape of the whole, or the bytes of the tile in another shape, has another name."""
    store, durability = any_store
    store.put("sharing/a", _with_tiles(0, 2), durability=durability)
    whole = Bundle.of_arrays({"W": np.concatenate([_W, _W])}).sealed().manifest.leaves[0]
    turned = Bundle.of_arrays({"W": _W.reshape(1024, 512)}).sealed().manifest.leaves[0]
    assert turned.digest.hex() == _SHARED.digest
    names = [SharedLeaf.of(leaf) for leaf in (whole, turned)]
    mixed = SharedLeaf(digest=_SHARED.digest, dtype="float32", shape=whole.shape)
    assert store.held("sharing", [*names, mixed, _SHARED], durability=durability) == (
        False,
        False,
        False,
        True,
    )


def test_a_spilled_bundle_takes_its_tiles_along(tmp_path: Path) -> None:
    """They are shared in the durable tier too, and the bundle is what it was."""
    with LocalStore.at(tmp_path.as_uri(), settings=Settings()) as store:
        sent = {f"run/{count}": _with_tiles(count, count) for count in (2, 3)}
        store.put("run/2", sent["run/2"], durability="host")
        assert store.held("run", [_SHARED], durability="host") == (True,)
        store.put("run/3", with_shared(sent["run/3"], [1]), durability="host")
        while store.stat("run/3").durability == "host":
            assert store._memory._make_room(1)
        for key, bundle in sent.items():
            assert_equal(store.get(key), bundle)
            assert store.get_leaf(key, 2).tobytes() == bundle.array(2).tobytes()


def test_a_leaf_that_the_run_does_not_hold_is_refused(any_store: tuple[Store, Durability]) -> None:
    """Leaves of other runs do not count; the error names the leaf, and nothing is stored."""
    store, durability = any_store
    _put_two(store, "sharing", durability)
    assert store.held("sharing-not", [_SHARED], durability=durability) == (False,)
    with pytest.raises(LeafNotHeld, match=r"leaf 1 .*W.*send the whole bundle"):
        store.put("sharing-not/b", with_shared(_bundle(2), [1]), durability=durability)
    with pytest.raises(NotFound):
        store.stat("sharing-not/b")


def test_a_shared_leaf_outlives_the_bundle_that_brought_it(
    local: tuple[LocalStore, Durability], clock: Clock
) -> None:
    """It is there for as long as any bundle has it, and goes some time after the last one."""
    store, durability = local
    sent = _put_two(store, "run", durability)
    store.delete("run/a")
    clock.now += 1000
    store.expire()
    assert_equal(store.get("run/b"), sent)
    store.put("run/b", _bundle(4), durability=durability, if_exists="replace")
    store.expire()
    assert store.held("run", [_SHARED], durability=durability) == (True,)
    clock.now += store.settings.dedup_seconds - 1
    store.expire()
    assert _bytes(store, "run") > _bundle(4).manifest.nbytes
    clock.now += 2
    store.expire()
    assert _bytes(store, "run") == _bundle(4).manifest.nbytes


def test_a_collected_leaf_is_made_again(local: tuple[LocalStore, Durability], clock: Clock) -> None:
    """Out of any bundle of the run that has it as its own."""
    store, durability = local
    store.put("run/a", _bundle(1), durability=durability)
    for _ in range(2):
        assert store.held("run", [_SHARED], durability=durability) == (True,)
        clock.now += 1000
        store.expire()
    store.delete("run/a")
    assert store.held("run", [_SHARED], durability=durability) == (False,)


def test_spilled_bundles_keep_their_leaves(tmp_path: Path) -> None:
    """Under memory pressure bundles and the leaves that they share go to the disk, these once."""
    settings = Settings(host_bytes=8 << 20, dedup_seconds=0)
    with LocalStore.at(tmp_path.as_uri(), settings=settings) as store:
        sent = {"run/b": _put_two(store, "run", "host")}
        for seed in range(3, 9):
            sent[f"run/{seed}"] = _bundle(seed)
            store.put(f"run/{seed}", with_shared(sent[f"run/{seed}"], [1]), durability="host")
        assert store.usage().spilled
        store.expire()
        for key, bundle in sent.items():
            assert_equal(store.get(key), bundle)
    with LocalStore.at(tmp_path.as_uri(), settings=settings) as store:
        assert_equal(store.get("run/b"), sent["run/b"])
    assert sum("~shared" in key for key in generations(tmp_path)) == 1


def test_the_index_can_be_made_anew(tmp_path: Path) -> None:
    """Which bundles have a leaf is read from their manifests again, before anything is collected."""
    settings = Settings(dedup_seconds=0)
    with LocalStore.at(tmp_path.as_uri(), settings=settings) as store:
        sent = _put_two(store, "run", "disk")
        store.delete("run/a")
    for path in tmp_path.glob("index.sqlite*"):
        path.unlink()
    with LocalStore.at(tmp_path.as_uri(), settings=settings) as store:
        store.expire()
        assert_equal(store.get("run/b"), sent)
        store.delete("run/b")
        store.expire()
    assert not generations(tmp_path)


def test_a_damaged_shared_leaf_is_named_and_mended(tmp_path: Path) -> None:
    """The error says which leaf of which bundle; a record that is gone makes the next client send the leaf."""
    with LocalStore.at(tmp_path.as_uri(), settings=Settings()) as store:
        sent = _put_two(store, "run", "disk")
        key = _SHARED.key("run")
        (record,) = [path for path in data_files(tmp_path, key) if path.name == "manifest.ocdbt"]
        record.write_bytes(record.read_bytes()[:-5])
        with pytest.raises(DataLoss, match=r"leaf 1 .*W.*run/~shared") as raised:
            store.get("run/b")
        assert raised.value.fields["leaf"] == "W"
        with pytest.raises(DataLoss, match="leaf 1"):
            store.get_leaf("run/b", 2)
        assert store.held("run", [_SHARED]) == (True,)
        assert_equal(store.get("run/b"), sent)
        store.delete("run/a")
    (record,) = [path for path in data_files(tmp_path, key) if path.name == "manifest.ocdbt"]
    record.write_bytes(b"")
    with LocalStore.at(tmp_path.as_uri(), settings=Settings()) as store:
        assert store.held("run", [_SHARED]) == (False,)


def test_a_shared_leaf_whose_bytes_are_damaged_is_not_held(tmp_path: Path) -> None:
    """It is made again from a bundle that has its bytes, or sent again: nothing is acknowledged that cannot be read."""
    with LocalStore.at(tmp_path.as_uri(), settings=Settings()) as store:
        sent = _put_two(store, "run", "disk")
    flip_a_bit(tmp_path, _SHARED.key("run"))
    with LocalStore.at(tmp_path.as_uri(), settings=Settings()) as store:
        assert store.held("run", [_SHARED]) == (True,)
        assert_equal(store.get("run/b"), sent)
        store.delete("run/a")
        flip_a_bit(tmp_path, _SHARED.key("run"))
    with LocalStore.at(tmp_path.as_uri(), settings=Settings()) as store:
        with pytest.raises(DataLoss, match="leaf 1"):
            store.get("run/b")
        assert store.held("run", [_SHARED]) == (False,)
        with pytest.raises(LeafNotHeld):
            store.put("run/c", with_shared(_bundle(3), [1]), durability="disk")


def test_damage_that_a_read_has_found_counts(tmp_path: Path) -> None:
    """Also in the process that has written the leaf, which takes it for whole at a glance."""
    with LocalStore.at(tmp_path.as_uri(), settings=Settings()) as store:
        sent = _put_two(store, "run", "disk")
        flip_a_bit(tmp_path, _SHARED.key("run"))
        with pytest.raises(DataLoss, match="leaf 1"):
            store.get("run/b")
        assert store.held("run", [_SHARED]) == (True,)
        assert_equal(store.get("run/b"), sent)


def test_what_a_process_committed_without_noting_it_counts(tmp_path: Path) -> None:
    """A bundle whose process died before the index had it keeps its leaves from another process that collects."""
    with LocalStore.at(tmp_path.as_uri(), settings=Settings(dedup_seconds=0)) as store:
        sent = _put_two(store, "run", "disk")
        store._durable.index.remove("run/b")  # type: ignore[union-attr]
        store.delete("run/a")
        store.expire()
        assert_equal(store.get("run/b"), sent)


def test_on_an_object_store_nothing_is_shared() -> None:
    """There is no lock between processes, so every bundle there has all of its leaves; those in memory may share."""
    url = '{"driver": "memory", "path": "objects"}'
    with LocalStore.at(url, settings=Settings()) as store:
        store.put("run/a", _bundle(1), durability="disk")
        assert store.held("run", [_SHARED]) == (False,)
        assert store.held("run", [_SHARED], durability="host") == (True,)
        sent = _bundle(2)
        with pytest.raises(LeafNotHeld, match="send the whole bundle"):
            store.put("run/b", with_shared(sent, [1]), durability="disk")
        store.put("run/b", with_shared(sent, [1]), durability="host")
        # Not by filling the memory, of which this driver of tensorstore keeps what it was given.
        assert store._memory._make_room(1)
        assert store.stat("run/b").durability == "disk"
        assert_equal(store.get("run/b"), sent)


def test_collection_takes_nothing_that_a_bundle_has() -> None:
    """Put, delete, collect, commit in memory, with a collection every 10 ms; nothing stays behind."""
    with LocalStore.in_memory(settings=SETTINGS) as store:
        seen = rounds(store, name="a", count=80, durability="host", seed=1)
        assert seen["shared"] > 10
        assert seen["refused"]
        store.delete_prefix("run/")
        assert store.usage().runs == ()


def test_collection_in_several_processes_takes_nothing_that_a_bundle_has(tmp_path: Path) -> None:
    """The same in two processes at one root."""
    command = [sys.executable, "-m", "tests.store.sharing_child", tmp_path.as_uri()]
    children = [
        subprocess.Popen([*command, name, "60"], stdout=subprocess.PIPE, text=True) for name in ("a", "b")
    ]
    answers = [child.communicate(timeout=60)[0] for child in children]
    assert all("'shared'" in answer for answer in answers), answers
    assert [child.returncode for child in children] == [0, 0]
    with LocalStore.at(tmp_path.as_uri(), settings=SETTINGS) as store:
        store.delete_prefix("run/")
    assert not generations(tmp_path)
