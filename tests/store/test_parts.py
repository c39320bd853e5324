"""Bundles in parts: each is out of sight until all are there, and then it is as if it had come whole."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt
import pytest

from residual_store import Bundle, Receipt, Settings, Store, open_store
from residual_store.engine.local import LocalStore
from residual_store.errors import AlreadyExists, InvalidManifest, InvalidOption, NotFound
from residual_store.manifest import Manifest, encode
from residual_store.parts import ATTEMPT, Part, Piece, part_bundle
from residual_store.store import IfExists
from tests.servers import Server
from tests.store.bundles import values_of

_RUNS = itertools.count()
_COLUMNS = values_of("bfloat16", (4, 6), seed=1)
_ROWS = values_of("int8", (4, 2), seed=2)
_MASK = np.arange(6) % 3 == 0


def _part(
    index: int, *, attempt: str = "one", add: int = 0, local: int = 7, last: slice = slice(3, 6)
) -> Bundle:
    """One of two parts: a leaf cut by columns, one by rows, a constant, one that is the first again, and two held by each."""
    rows = _ROWS + np.int8(add)
    arrays = {"columns": _COLUMNS, "rows": rows, "zeros": np.zeros((4, 2)), "again": _COLUMNS}
    arrays |= {"local": np.int64(local), "mask": _MASK}
    whole = replace(Bundle.of_arrays(arrays).manifest, created=float(index), user={ATTEMPT: attempt})
    cut, half = (slice(0, 3), last)[index], slice(2 * index, 2 * index + 2)
    pieces = [
        Piece(leaf=0, start=(0, cut.start), values=_COLUMNS[:, cut]),
        Piece(leaf=1, start=(half.start, 0), values=rows[half]),
        Piece(leaf=2, start=(half.start, 0), values=np.zeros((2, 2))),
        Piece(leaf=4, start=(), values=np.asarray(np.int64(local))),
        Piece(leaf=5, start=(0,), values=_MASK),
    ]
    return part_bundle(whole, pieces, identities=[0, 1, 2, 0, 4, 5])


def _put(store: Store, key: str, index: int, bundle: Bundle, if_exists: IfExists = "error") -> Receipt:
    return store.put(key, bundle, if_exists=if_exists, part=Part(index=index, count=2))


def _same(one: npt.NDArray[np.generic], other: npt.NDArray[np.generic]) -> bool:
    return (one.dtype, one.shape, one.tobytes()) == (other.dtype, other.shape, other.tobytes())


class _Clock:
    now = 1e6

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> _Clock:
    """The clock of the local stores."""
    return _Clock()


@pytest.fixture(params=["memory", "file", "http", "segment"])
def store(
    request: pytest.FixtureRequest,
    tmp_path: Path,
    clock: _Clock,
    memory_server: Server,
    mapped_server: Server,
) -> Iterator[Store]:
    """A store of each kind."""
    settings = Settings(mapped_bytes=1) if request.param == "segment" else Settings()
    match request.param:
        case "memory":
            opened: Store = LocalStore.in_memory(settings=settings, clock=clock)
        case "file":
            opened = LocalStore.at(tmp_path.as_uri(), settings=settings, clock=clock)
        case "http":
            opened = open_store(memory_server.url, settings=settings)
        case _:
            opened = open_store(mapped_server.url, settings=settings)
    with opened:
        yield opened


@pytest.fixture
def key() -> str:
    """A key that no other test uses."""
    return f"parts{next(_RUNS)}/a"


def test_it_is_there_with_its_last_part_and_not_before(store: Store, key: str) -> None:
    """No get, stat or list shows a part; the whole has every leaf bit by bit, constants and repetitions as such."""
    _put(store, key, 1, _part(1))
    with pytest.raises(NotFound):
        store.stat(key)
    with pytest.raises(NotFound):
        store.get(key)
    assert store.list(prefix=key).entries == ()
    _put(store, key, 0, _part(0))
    bundle = store.get(key)
    for index, array in enumerate(
        [_COLUMNS, _ROWS, np.zeros((4, 2)), _COLUMNS, np.asarray(np.int64(7)), _MASK]
    ):
        assert _same(bundle.array(index), array)
    assert [leaf.encoding for leaf in bundle.manifest.leaves][:4] == ["raw", "raw", "constant", "alias"]
    assert [entry.key for entry in store.list(prefix=key).entries] == [key]
    bundle.verify(InvalidManifest)


def test_who_waits_wakes_with_the_last_part(store: Store, key: str) -> None:
    """A get that waits ends when the bundle is whole."""
    _put(store, key, 0, _part(0))
    last = threading.Timer(0.05, lambda: _put(store, key, 1, _part(1)))
    last.start()
    assert _same(store.get(key, wait=20).array(1), _ROWS)
    last.join()


def test_a_repeated_part_changes_nothing(store: Store, key: str) -> None:
    """A part may come again, before the others and after them, and says that it was there."""
    assert not _put(store, key, 0, _part(0)).existed
    assert _put(store, key, 0, _part(0)).existed
    _put(store, key, 1, _part(1))
    digest = store.stat(key).digest
    for choice in ("error", "same", "replace"):
        assert _put(store, key, 1, _part(1), choice).existed
    assert store.stat(key).digest == digest


def test_a_part_of_a_bundle_that_is_being_deleted_waits_for_the_others(key: str) -> None:
    """A repeated part finds the bundle there and then not; that is no error of the put."""

    class Fleeting(LocalStore):
        def manifest(self, key: str) -> Manifest:
            found = super().manifest(key)
            self.delete(key)
            return found

    with Fleeting.in_memory(settings=Settings()) as store:
        for index in (0, 1):
            _put(store, key, index, _part(index))
        for index in (0, 1):
            assert not _put(store, key, index, _part(index)).existed
        assert _same(store.get(key).array(1), _ROWS)


@pytest.mark.parametrize(
    ("arrays", "said"),
    [
        ({"columns": np.zeros(3)}, "leaves has 6 entries there and 1 here"),
        (
            dict.fromkeys(("columns", "rows", "zeros", "again", "local", "mask"), _COLUMNS),
            r"rows: leaves\[1\].dtype is int8 there and bfloat16 here",
        ),
    ],
)
def test_parts_of_different_bundles_are_refused(
    store: Store, key: str, arrays: dict[str, npt.NDArray[np.generic]], said: str
) -> None:
    """The error names the leaf and what differs; the part that was there first can still be completed."""
    _put(store, key, 0, _part(0))
    whole = replace(Bundle.of_arrays(arrays).manifest, user={ATTEMPT: "one"})
    other = part_bundle(whole, [], identities=list(range(len(arrays))))
    with pytest.raises(InvalidManifest, match=rf"part 1/2 of .* is of another bundle than part 0/2: {said}"):
        _put(store, key, 1, other)
    _put(store, key, 1, _part(1))
    assert store.stat(key).leaves == 6


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (_part(1, local=8), "local differs between the processes"),
        (_part(1, last=slice(2, 5)), "do not cover columns"),
        (_part(1, last=slice(4, 6)), "do not cover columns"),
    ],
)
def test_pieces_that_do_not_fit_are_refused(store: Store, key: str, wrong: Bundle, said: str) -> None:
    """A leaf that should be equal in all processes and is not, an overlap and a gap: nothing becomes visible."""
    _put(store, key, 0, _part(0))
    with pytest.raises(InvalidManifest, match=said):
        _put(store, key, 1, wrong)
    with pytest.raises(NotFound):
        store.stat(key)


def test_if_exists_holds_for_the_whole(store: Store, key: str) -> None:
    """Another bundle is in the way of a part, equal values are not, and a replaced one stays until the last part is there."""
    for index in (0, 1):
        _put(store, key, index, _part(index))
    with pytest.raises(AlreadyExists):
        _put(store, key, 0, _part(0, attempt="two"))
    for index in (0, 1):
        _put(store, key, index, _part(index, attempt="two"), "same")
    _put(store, key, 0, _part(0, attempt="three", add=1), "replace")
    assert _same(store.get(key).array(1), _ROWS)
    _put(store, key, 1, _part(1, attempt="three", add=1), "replace")
    assert _same(store.get(key).array(1), _ROWS + np.int8(1))


def test_parts_of_two_offloads_never_become_one_bundle(store: Store, key: str) -> None:
    """What is left of an offload that failed is not taken for a part of the next one."""
    _put(store, key, 0, _part(0, attempt="failed", add=1))
    _put(store, key, 1, _part(1, attempt="next"))
    with pytest.raises(NotFound):
        store.stat(key)
    _put(store, key, 0, _part(0, attempt="next"))
    assert _same(store.get(key).array(1), _ROWS)


@pytest.mark.parametrize(
    "part", [Part(index=2, count=2), Part(index=0, count=0), Part(index=0, count=1 << 17)]
)
def test_a_part_that_cannot_be_is_refused(store: Store, key: str, part: Part) -> None:
    """The index is below the count, and the count has a limit."""
    with pytest.raises(InvalidOption, match="part is"):
        store.put(key, _part(0), part=part)


def test_a_bundle_that_is_no_part_is_refused_as_one(store: Store, key: str) -> None:
    """Its first leaf does not describe a whole."""
    with pytest.raises(InvalidManifest, match="first leaf of a part"):
        _put(store, key, 0, Bundle.of_arrays({"h": np.arange(5)}))


@pytest.mark.parametrize("array", [np.zeros(8), np.arange(8) % 3 == 0])
def test_a_whole_that_is_encoded_already_is_refused(
    store: Store, key: str, array: npt.NDArray[np.generic]
) -> None:
    """Its length says nothing of the pieces, so they would not fit."""
    whole = Bundle.of_arrays({"h": array}).sealed().manifest
    packed = msgspec.msgpack.encode({"manifest": encode(whole), "pieces": [(0, [0])]})
    part = Bundle.of_arrays({"part": np.frombuffer(packed, np.uint8), "h[0:8]": array[::-1]})
    with pytest.raises(InvalidManifest, match=r"h is (constant|bits) in the description of a part"):
        store.put(key, part, part=Part(index=0, count=1))


@pytest.mark.parametrize("store", ["memory", "file"], indirect=True)
def test_a_part_alone_expires(store: LocalStore, key: str, clock: _Clock) -> None:
    """After its lease it is gone, so the other part alone does not make the bundle."""
    _put(store, key, 0, _part(0))
    clock.now += store.settings.part_ttl_seconds + 1
    assert store.expire() == 1
    assert store.usage().expired == 1
    _put(store, key, 1, _part(1))
    with pytest.raises(NotFound):
        store.stat(key)


def test_a_part_on_disk_outlives_the_store(tmp_path: Path) -> None:
    """An acknowledged part is completed after the store was opened anew, and what was left there expires."""
    clock = _Clock()
    with LocalStore.at(tmp_path.as_uri(), settings=Settings(), clock=clock) as store:
        assert _put(store, "run/a", 0, _part(0)).durability == "disk"
        _put(store, "run/b", 0, _part(0))
    with LocalStore.at(tmp_path.as_uri(), settings=Settings(), clock=clock) as store:
        _put(store, "run/a", 1, _part(1))
        assert _same(store.get("run/a").array(0), _COLUMNS)
        clock.now += store.settings.part_ttl_seconds + 1
        assert store.expire() == 1


def test_dropping_a_run_drops_its_parts(tmp_path: Path) -> None:
    """A part that comes after its run was deleted does not find the other one."""
    with open_store(tmp_path.as_uri()) as store:
        _put(store, "run/a", 0, _part(0))
        store.delete_prefix("run/")
        _put(store, "run/a", 1, _part(1))
        with pytest.raises(NotFound):
            store.stat("run/a")
