"""The database of one bundle: few files, readable by any tensorstore, and never damaged data in place of an error."""

from __future__ import annotations

import gc
import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from residual_store import Bundle, Settings
from residual_store.dtypes import DTYPES
from residual_store.engine.local import LocalStore
from residual_store.errors import DataLoss
from residual_store.leaf import Leaf
from tests.store.bundles import assert_equal, every_dtype, noise, sharded, values_of
from tests.store.plain import assert_stored, stored_array
from tests.store.roots import data_files

# Leaves of a few KiB count as large, so that the files are small enough to damage them in many places.
SMALL = Settings(packed_leaf_bytes=4096, chunk_bytes=16_384)


@pytest.fixture(params=["file", "kvstack"])
def store(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[LocalStore]:
    """A store on disk whose leaves above 4 KiB have arrays of their own.

    Its files are read as files, and through a key-value store that does not look like files, as an object store does not.
    """
    file = {"driver": "file", "path": f"{tmp_path}/"}
    spec = file if request.param == "file" else {"driver": "kvstack", "layers": [{"base": file}]}
    with LocalStore.at(json.dumps(spec), settings=SMALL) as store:
        yield store


def _mixed() -> Bundle:
    return sharded(
        {
            "large": (values_of("float32", (100, 100)), 1),
            "small": (values_of("bfloat16", (70,), seed=1), 1),
            "large nibbles": (values_of("int4", (5000,), seed=2), 1),
            "large crumbs": (values_of("uint2", (6000,), seed=3), 1),
            "constant": (np.zeros(100_000), 1),
            "large mask": (np.arange(50_000) % 7 == 0, 1),
            "small too": (values_of("int16", (300,), seed=4), 1),
            "small tiles": (np.concatenate([values_of("float16", (8, 3), seed=5)] * 3), 3),
            "large tiles": (np.concatenate([values_of("float32", (30, 100), seed=6)] * 2), 2),
        }
    )


def _stored(leaf: Leaf) -> bool:
    return leaf.nbytes >= 64


def test_a_thousand_leaves_are_three_files(tmp_path: Path) -> None:
    """1,000 leaves of 4 KiB are at most three files on disk, and come back."""
    bundle = noise(*[4096] * 1000)
    with LocalStore.at(tmp_path.as_uri(), settings=Settings()) as store:
        store.put("run/a", bundle)
        assert 2 <= len(data_files(tmp_path, "run/a")) <= 3
        assert_equal(store.get("run/a"), bundle)


def test_a_bundle_takes_little_more_than_its_bytes(tmp_path: Path) -> None:
    """On disk a leaf takes its own bytes and a few KiB, whatever its size is as a multiple of a chunk."""
    with LocalStore.at(tmp_path.as_uri(), settings=Settings()) as store:
        for size in ((1 << 20) + 1, (8 << 20) + 1, (9 << 20) + 5, 17 << 20):
            store.put(f"run/{size}", noise(size))
            on_disk = sum(path.stat().st_size for path in data_files(tmp_path, f"run/{size}"))
            assert size < on_disk < size * 1.02 + 16_384


def test_any_tensorstore_reads_a_bundle(store: LocalStore, tmp_path: Path) -> None:
    """Plain tensorstore, without this package, finds the large leaves as arrays and the small ones packed."""
    bundle = _mixed()
    store.put("run/a", bundle)
    assert stored_array(tmp_path, "run/a", "leaves/0/").dtype == DTYPES["float32"]
    assert_stored(tmp_path, "run/a", bundle, packed_below=SMALL.packed_leaf_bytes)


def test_every_dtype_is_stored_as_a_large_leaf(store: LocalStore) -> None:
    """Each dtype comes back from an array of its own, those that tensorstore lacks as well."""
    bundle = every_dtype((9, 500))
    store.put("run/a", bundle)
    assert_equal(store.get("run/a"), bundle)
    for leaf in bundle.manifest.leaves:
        assert store.get_leaf("run/a", leaf.index).tobytes() == bundle.array(leaf.index).tobytes()


@pytest.mark.parametrize(("written", "read"), [(1 << 20, 1 << 10), (1 << 10, 1 << 20)])
def test_another_limit_of_small_leaves_reads_old_bundles(tmp_path: Path, written: int, read: int) -> None:
    """A root that was written with one packed_leaf_bytes can be read with another."""
    bundle = noise(100_000, 10, 2000)
    with LocalStore.at(tmp_path.as_uri(), settings=Settings(packed_leaf_bytes=written)) as store:
        store.put("run/a", bundle)
    with LocalStore.at(tmp_path.as_uri(), settings=Settings(packed_leaf_bytes=read)) as store:
        assert_equal(store.get("run/a"), bundle)


# Damage


def _loss(call: Callable[[], object]) -> DataLoss | None:
    """The loss that a call reports; None if it gives data; anything else is raised."""
    try:
        call()
    except DataLoss as error:
        return error
    return None


def _is_intact_or_lost(store: LocalStore, bundle: Bundle) -> bool:
    """Whether a get is refused; data that it gives must be right."""
    got: list[Bundle] = []
    loss = _loss(lambda: got.append(store.get("run/a")))
    for one in got:
        assert_equal(one, bundle)
    return loss is not None and "run/a" in str(loss)


def test_no_flipped_bit_becomes_data(store: LocalStore, tmp_path: Path) -> None:
    """A flip at each bit of the smallest file and at 600 random places of the others is an error or changes nothing."""
    bundle, chance = _mixed(), random.Random(11)
    store.put("run/a", bundle)
    for path in data_files(tmp_path, "run/a"):
        whole = path.read_bytes()
        bits = range(len(whole) * 8)
        places = bits if len(bits) < 2000 else chance.sample(bits, 600)
        refused = 0
        for place in places:
            damaged = bytearray(whole)
            damaged[place // 8] ^= 1 << place % 8
            path.write_bytes(damaged)
            refused += _is_intact_or_lost(store, bundle)
        path.write_bytes(whole)
        # A few bits, such as those of a fill value, have no meaning for what is stored.
        assert refused > 0.95 * len(places)
    assert_equal(store.get("run/a"), bundle)


def test_the_damaged_leaf_is_named(store: LocalStore, tmp_path: Path) -> None:
    """After a flip within the bytes of a leaf, a get of the bundle and of that leaf name it, and the others can be got."""
    bundle = _mixed()
    store.put("run/a", bundle)
    for leaf in filter(_stored, bundle.manifest.leaves):
        payload = bundle.payloads[leaf.index].tobytes()
        path, whole = next(
            (path, data)
            for path in data_files(tmp_path, "run/a")
            if payload[:64] in (data := path.read_bytes())
        )
        damaged = bytearray(whole)
        damaged[whole.index(payload[:64]) + 40] ^= 4
        path.write_bytes(damaged)
        for call in (lambda: store.get("run/a"), lambda leaf=leaf: store.get_leaf("run/a", leaf.index)):
            loss = _loss(call)
            assert loss is not None
            assert (loss.fields["leaf"], loss.fields["index"]) == (leaf.path, leaf.index)
        assert store.get_leaf("run/a", 4).tobytes() == bundle.array(4).tobytes()
        path.write_bytes(whole)


def test_two_threads_read_what_one_would(tmp_path: Path) -> None:
    """A bundle that is large enough for two threads comes back, and a flip in any leaf names that one, again and again."""
    bundle = noise(5000, *[4 << 20] * 6, 5 << 20)
    with LocalStore.at(tmp_path.as_uri(), settings=Settings()) as store:
        store.put("run/a", bundle, durability="disk")
        assert_equal(store.get("run/a"), bundle)
        for leaf in bundle.manifest.leaves:
            place, path = _found(bundle.payloads[leaf.index].tobytes(), data_files(tmp_path, "run/a"))
            with path.open("r+b") as file:
                file.seek(place)
                whole = file.read(1)
                file.seek(place)
                file.write(bytes([whole[0] ^ 4]))
            loss = _loss(lambda: store.get("run/a"))
            assert loss is not None
            assert (loss.fields["leaf"], loss.fields["index"]) == (leaf.path, leaf.index)
            with path.open("r+b") as file:
                file.seek(place)
                file.write(whole)
        assert_equal(store.get("run/a"), bundle)


def test_a_failed_read_keeps_no_memory(tmp_path: Path) -> None:
    """Whichever of two threads fails, the memory of the bundle is free without the garbage collector."""
    bundle = noise(*[4 << 20] * 6)
    with LocalStore.at(tmp_path.as_uri(), settings=Settings()) as store:
        store.put("run/a", bundle, durability="disk")
        before = store.usage().host_held_bytes
        gc.disable()
        try:
            for leaf in bundle.manifest.leaves:
                _, path = _found(bundle.payloads[leaf.index].tobytes(), data_files(tmp_path, "run/a"))
                whole = path.read_bytes()
                path.write_bytes(whole[:100])
                assert _loss(lambda: store.get("run/a")) is not None
                path.write_bytes(whole)
                assert store.usage().host_held_bytes == before
        finally:
            gc.enable()


def _found(payload: bytes, paths: list[Path]) -> tuple[int, Path]:
    """Where the bytes lie."""
    return next((at, path) for path in paths if (at := path.read_bytes().find(payload[:64])) >= 0)


def test_a_truncated_file_is_an_error(store: LocalStore, tmp_path: Path) -> None:
    """Each file cut at many lengths, to nothing included, is a loss."""
    bundle, chance = _mixed(), random.Random(12)
    store.put("run/a", bundle)
    for path in data_files(tmp_path, "run/a"):
        whole = path.read_bytes()
        for length in (0, 1, len(whole) - 1, *chance.sample(range(len(whole)), 30)):
            path.write_bytes(whole[:length])
            assert _is_intact_or_lost(store, bundle), (path.name, length)
        path.write_bytes(whole)
    assert_equal(store.get("run/a"), bundle)


def test_a_deleted_file_is_an_error(store: LocalStore, tmp_path: Path) -> None:
    """Each file of a bundle is missed, and the loss says which leaves are gone with it."""
    bundle = noise(100_000, 10)
    for number in range(len(_files_of(store, tmp_path, bundle))):
        store.put("run/a", bundle, if_exists="replace")
        data_files(tmp_path, "run/a")[number].unlink()
        for call in (
            lambda: store.get("run/a"),
            lambda: store.get_leaf("run/a", 0),
            lambda: store.manifest("run/a"),
        ):
            loss = _loss(call)
            assert loss is not None
            assert "run/a" in str(loss)
            assert "leaves" in str(loss)
        store.delete("run/a")
        assert data_files(tmp_path, "run/a") == []


def _files_of(store: LocalStore, root: Path, bundle: Bundle) -> list[Path]:
    store.put("run/a", bundle)
    found = data_files(root, "run/a")
    assert len(found) >= 2
    return found


def test_a_damaged_bundle_can_be_replaced(store: LocalStore, tmp_path: Path) -> None:
    """Damage does not stay for ever: a replacement is whole, whichever file was damaged."""
    bundle = noise(100_000, 10)
    for number in range(len(_files_of(store, tmp_path, bundle))):
        store.put("run/a", noise(90_000), if_exists="replace")
        data_files(tmp_path, "run/a")[number].write_bytes(b"damaged")
        assert _loss(lambda: store.get("run/a")) is not None
        store.put("run/a", bundle, if_exists="replace")
        assert_equal(store.get("run/a"), bundle)


def test_a_repeated_put_mends_a_bundle_whose_database_is_gone(store: LocalStore, tmp_path: Path) -> None:
    """ "This very bundle is there already" is not said of one that is not."""
    bundle = noise(100_000, 10)
    store.put("run/a", bundle)
    for path in (tmp_path / "bundles").rglob("manifest.ocdbt"):
        path.unlink()
    store.put("run/a", bundle)
    assert_equal(store.get("run/a"), bundle)
