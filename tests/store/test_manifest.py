"""The manifest: what is encoded is decoded, and hostile bytes are refused quickly, with little memory and by name."""

from __future__ import annotations

import contextlib
import time
import tracemalloc
from collections.abc import Callable, Iterator
from typing import Any

import msgpack
import msgspec
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from residual_store import Bundle, Manifest, Settings
from residual_store.digest import NO_DIGEST
from residual_store.errors import InvalidFrame, InvalidManifest, TooLarge
from residual_store.manifest import decode, decode_as_written, encode
from tests.data.make_golden import golden_bundles
from tests.server.memory_client import peak, reset_peak, resident
from tests.store.bundles import sharded, split
from tests.store.strategies import bundles, user_values

type Map = dict[str, Any]


def _content() -> Map:
    """A valid manifest of four leaves, as plain msgpack content."""
    h = np.arange(40.0)
    bundle = Bundle.of_arrays({"h": h, "again": h, "zeros": np.zeros(9), "mask": np.arange(70) % 3 == 0})
    found: Map = msgpack.unpackb(encode(bundle.sealed().manifest))
    return found


def _decode(content: object) -> Manifest:
    packed: bytes = content if isinstance(content, bytes) else msgpack.packb(content)
    return decode(packed, Settings())


@settings(deadline=None, max_examples=150)
@given(bundles())
def test_a_manifest_comes_back(bundle: Bundle) -> None:
    """decode is the inverse of encode, field by field, and its fast reader alone is enough for that."""
    packed = encode(bundle.manifest)
    assert decode(packed, Settings()) == bundle.manifest
    assert decode_as_written(packed, Settings()) == bundle.manifest


# Random damage

_VALUES = st.recursive(
    st.none() | st.floats() | user_values | st.binary(max_size=20) | st.just(-1) | st.just(1 << 62),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)


def _refused_or_equal(packed: bytes) -> None:
    """Only the errors of the format come out, and what is read can be written and read again."""
    with contextlib.suppress(InvalidManifest, InvalidFrame, TooLarge):
        manifest = decode(packed, Settings())
        assert encode(decode(encode(manifest), Settings())) == encode(manifest)


@settings(deadline=None, max_examples=500)
@given(st.data())
def test_random_changes_of_bytes_never_crash(data: st.DataObject) -> None:
    """Bytes that are flipped, cut out, put in or cut off give a manifest or an error of the format."""
    packed = bytearray(msgpack.packb(_content()))
    for _ in range(data.draw(st.integers(1, 4))):
        place = data.draw(st.integers(0, len(packed)))
        match data.draw(st.sampled_from(["flip", "remove", "insert", "cut"])):
            case "flip" if place < len(packed):
                packed[place] ^= data.draw(st.integers(1, 255))
            case "remove":
                del packed[place : place + data.draw(st.integers(1, 9))]
            case "insert":
                packed[place:place] = data.draw(st.binary(min_size=1, max_size=9))
            case "cut":
                del packed[place:]
    _refused_or_equal(bytes(packed))


@settings(deadline=None, max_examples=500)
@given(st.data())
def test_random_changes_of_fields_never_crash(data: st.DataObject) -> None:
    """Any field replaced by any value, removed or added gives a manifest or an error of the format."""
    content = _content()
    place: Map = data.draw(st.sampled_from([content, *content["leaves"]]))
    name = data.draw(st.sampled_from([*sorted(place), "new"]))
    if data.draw(st.booleans()):
        place[name] = data.draw(_VALUES)
    else:
        place.pop(name, None)
    _refused_or_equal(msgpack.packb(content))


def _outcome(content: Map) -> Manifest | str:
    try:
        return decode(msgpack.packb(content), Settings())
    except InvalidManifest as error:
        return error.detail


def _maps(content: object) -> Iterator[Map]:
    """All maps in some content."""
    if isinstance(content, dict):
        yield content
    if isinstance(content, dict | list):
        for inner in content.values() if isinstance(content, dict) else content:
            yield from _maps(inner)


@settings(deadline=None, max_examples=1000)
@given(st.data())
def test_both_readers_agree(data: st.DataObject) -> None:
    """Whatever a field is replaced by, a manifest as `encode` writes it and one in another order fare alike."""
    content: Map = msgpack.unpackb(encode(golden_bundles()["every-field"].manifest))
    place = data.draw(st.sampled_from(list(_maps(content))))
    name = data.draw(st.sampled_from(sorted(place)))
    place[name] = data.draw(_VALUES | st.sampled_from([0, True, [], [3], [-3, -5], "alias", "x" * 5000]))
    outcome = _outcome(content)
    assert outcome == _outcome(dict(reversed(content.items())))
    if isinstance(outcome, Manifest):
        assert msgpack.unpackb(encode(outcome)) == content


def test_both_readers_know_the_limits() -> None:
    """Each limit of the settings holds for a manifest as `encode` writes it, by the text of the precise reader."""
    manifest = golden_bundles()["every-field"].manifest
    decode(encode(manifest), Settings())
    for tight in ({"max_leaves": 8}, {"max_path_chars": 18}, {"max_rank": 1}, {"max_user_chars": 5}):
        with pytest.raises(InvalidManifest, match=r"limit|at most"):
            decode(encode(manifest), Settings(**tight))


@settings(deadline=None, max_examples=500)
@given(st.binary(max_size=200))
def test_random_bytes_never_crash(packed: bytes) -> None:
    """Bytes that were never a manifest are refused."""
    with pytest.raises(InvalidManifest):
        decode(packed, Settings())


# Hostile manifests


def _tiled(**changes: object) -> Map:
    """The same with a tiled leaf alone, of two tiles of three elements."""
    bundle = sharded({"h": (np.tile(np.arange(3.0), 2), 2)})
    content: Map = msgpack.unpackb(encode(bundle.sealed().manifest))
    content["leaves"][0].update(changes)
    return content


def _split(count: int, ndim: int = 1) -> Map:
    found: Map = msgspec.to_builtins(split(count, ndim=ndim))
    return found


def _with(name: str, value: object, leaf: int | None = 0) -> Map:
    content = _content()
    (content if leaf is None else content["leaves"][leaf])[name] = value
    return content


def _without(name: str, leaf: int | None = 0) -> Map:
    content = _content()
    del (content if leaf is None else content["leaves"][leaf])[name]
    return content


def _nested(depth: int) -> bytes:
    return b"\x81\xa7in_tree" + b"\x91" * depth + b"\x90"


def _packed(content: object) -> bytes:
    packed: bytes = msgpack.packb(content)
    return packed


def _twice() -> bytes:
    packed = _packed(_content())
    assert packed[:1] == b"\xde" or packed[0] <= 0x8F
    size = 3 if packed[:1] == b"\xde" else 1
    head = b"\xde" + (len(_content()) + 1).to_bytes(2, "big")
    return head + packed[size:] + _packed("x64") + _packed(True)


def _deep_key(depth: int) -> Map:
    key: list[object] = ["int", 1]
    for _ in range(depth):
        key = ["tuple", [key]]
    return _with("in_tree", [["dict", [key]], ["none"]], None)


def _claims(head: bytes) -> bytes:
    return b"\x81\xa6leaves" + head


_HOSTILE: dict[str, Callable[[], object]] = {
    "nothing": lambda: b"",
    "a pickle": lambda: (
        b"\x80\x04\x95\x10\x00\x00\x00\x00\x00\x00\x00\x8c\x02os\x94\x8c\x06system\x94\x93\x94."
    ),
    "a list": list,
    "trailing bytes": lambda: _packed(_content()) + b"\0",
    "a key twice": _twice,
    "2,000 lists deep": lambda: _nested(2000),
    "200,000 lists deep": lambda: _nested(200_000),
    "a claimed 2**31 entries": lambda: _claims(b"\xdd\x80\x00\x00\x00"),
    "a claimed 10**9 leaves": lambda: _claims(b"\xdd" + (10**9).to_bytes(4, "big")),
    "a claimed 4 GiB of text": lambda: _claims(b"\xdb\xff\xff\xff\xff"),
    "a claimed 4 GiB of bytes": lambda: _claims(b"\xc6\xff\xff\xff\xff"),
    "an extension": lambda: _claims(b"\xc7\x00\x01"),
    "a key that is no text": lambda: _packed(_content() | {7: 1}),
    "an integer above 64 bits": lambda: _claims(b"\xc1"),
    "another version": lambda: _with("format", 2, None),
    "version true": lambda: _with("format", True, None),
    "version 1.0": lambda: _with("format", 1.0, None),
    "no version": lambda: _without("format", None),
    "an unknown field": lambda: _with("formats", 1, None),
    "an unknown field of a leaf": lambda: _with("Dtype", "f4"),
    "a missing field of a leaf": lambda: _without("nbytes"),
    "created at no time": lambda: _with("created", float("nan"), None),
    "created in the end": lambda: _with("created", float("inf"), None),
    "an infinite number of the user": lambda: _with("user", {"a": float("-inf")}, None),
    "a list of the user": lambda: _with("user", {"a": [1]}, None),
    "100 entries of the user": lambda: _with("user", {str(i): i for i in range(100)}, None),
    "a huge text of the user": lambda: _with("user", {"a": "x" * 5000}, None),
    "a huge function": lambda: _with("function", "x" * 50_000, None),
    "leaves in a map": lambda: _with("leaves", {}, None),
    "a leaf that is a list": lambda: _with("leaves", [[]], None),
    "a leaf twice": lambda: {**_content(), "leaves": [_content()["leaves"][0]] * 2},
    "leaves in another order": lambda: {**_content(), "leaves": _content()["leaves"][::-1]},
    "a shape above all memory": lambda: _with("shape", [2**40, 2**40]),
    "a shape whose product wraps to 40": lambda: _with("shape", [2**32, 2**32, 40]),
    "a negative dimension": lambda: _with("shape", [-40]),
    "two negative dimensions": lambda: _with("shape", [-5, -8]),
    "a dimension that is a float": lambda: _with("shape", [40.0]),
    "a dimension that is true": lambda: _with("shape", [True]),
    "a dimension of text": lambda: _with("shape", ["40"]),
    "a thousand dimensions": lambda: _with("shape", [1] * 1000),
    "30,000 huge dimensions": lambda: _with("shape", [2**61] * 30_000),
    "a million dimensions": lambda: _with("shape", [1] * 1_000_000),
    "a dtype of numpy": lambda: _with("dtype", "<f8"),
    "a dtype of objects": lambda: _with("dtype", "O"),
    "another dtype": lambda: _with("dtype", "float32"),
    "too few bytes": lambda: _with("nbytes", 319),
    "too many bytes": lambda: _with("nbytes", 321),
    "a negative number of bytes": lambda: _with("nbytes", -320),
    "a number of bytes that is a float": lambda: _with("nbytes", 320.0),
    "an offset within another leaf": lambda: _with("offset", 0, 2),
    "an offset behind a gap": lambda: _with("offset", 1 << 20, 2),
    "an offset that is not aligned": lambda: _with("offset", 328, 2),
    "an offset past the end of the world": lambda: _with("offset", 1 << 63, 2),
    "a short digest": lambda: _with("digest", b"x"),
    "a digest of text": lambda: _with("digest", "x" * 16),
    "an alias of itself": lambda: _with("alias_of", 1, 1),
    "an alias of a later leaf": lambda: _with("alias_of", 3, 1),
    "an alias of a leaf that is none": lambda: _with("alias_of", 99, 1),
    "an alias of another size": lambda: _with("shape", [41], 1),
    "an alias of nothing": lambda: _with("alias_of", None, 1),
    "a raw leaf that is an alias": lambda: _with("alias_of", 0, 2),
    "bits that are no bools": lambda: _with("dtype", "int8", 3),
    "a constant without elements": lambda: _with("shape", [0], 2),
    "tiles without a sharding": lambda: _tiled(sharding=None),
    "tiles over an axis that is not there": lambda: _tiled(sharding={**_split(2), "axis_names": ["j"]}),
    "one tile": lambda: _tiled(sharding=_split(1), nbytes=48),
    "no tile": lambda: _tiled(sharding=_split(0)),
    "tiles that do not go up": lambda: _tiled(sharding=_split(4), nbytes=12),
    "more tiles than rows": lambda: _tiled(sharding=_split(1 << 61), nbytes=0),
    "tiles of another size": lambda: _tiled(nbytes=16),
    "tiles with the bytes of all": lambda: _tiled(nbytes=48),
    "tiles without bytes": lambda: _tiled(nbytes=0),
    "tiles of a scalar": lambda: _tiled(shape=[], nbytes=4),
    "tiles of no rows": lambda: _tiled(shape=[0], nbytes=0),
    "tiles of empty rows": lambda: _tiled(shape=[6, 0], sharding=_split(2, 2), nbytes=0),
    "a shared tile without a sharding": lambda: _tiled(encoding="shared_tile", sharding=None, nbytes=0),
    "a shared tile with bytes": lambda: _tiled(encoding="shared_tile"),
    "a shared tile of no rows": lambda: _tiled(encoding="shared_tile", shape=[0], nbytes=0),
    "a shared tile without a digest": lambda: _tiled(encoding="shared_tile", nbytes=0, digest=NO_DIGEST),
    "a key without an implementation": lambda: _with("kind", "key"),
    "an unknown encoding": lambda: _with("encoding", "gzip"),
    "an unknown channel": lambda: _with("channel", "../"),
    "a tree of too few nodes": lambda: _with("in_tree", [["tuple", 2], ["none"]], None),
    "a tree of too many nodes": lambda: _with("in_tree", [["tuple", 1], ["none"], ["none"]], None),
    "a node with 2**62 children": lambda: _with("in_tree", [["tuple", 1 << 62]], None),
    "a node with -1 children": lambda: _with("in_tree", [["list", -1]], None),
    "a node with true children": lambda: _with("in_tree", [["list", True], ["none"]], None),
    "a node of no kind": lambda: _with("in_tree", [["pickle", "x"]], None),
    "a node that is no list": lambda: _with("in_tree", ["none"], None),
    "a key of no kind": lambda: _with("in_tree", [["dict", [["object", "x"]]], ["none"]], None),
    "a key 200 tuples deep": lambda: _deep_key(200),
    "shards": lambda: _with("shards", [1]),
    "text that is no UTF-8": lambda: _packed(_content()).replace(b"again", b"\xff\xfe\xfd\xfc\xfb"),
    "a lone surrogate": lambda: _packed(_content()).replace(b"again", b"ag\xed\xb2\x80"),
}


@pytest.mark.parametrize("case", _HOSTILE)
def test_a_hostile_manifest_is_refused(case: str) -> None:
    """Each is InvalidManifest within a second and 32 MiB, with a text that is short and says what is wrong."""
    packed = content if isinstance(content := _HOSTILE[case](), bytes) else msgpack.packb(content)
    tracemalloc.start()
    try:
        started = time.process_time()
        with pytest.raises(InvalidManifest) as caught:
            decode(packed, Settings())
        assert time.process_time() - started < 1
        assert tracemalloc.get_traced_memory()[1] < 32 << 20
    finally:
        tracemalloc.stop()
    assert 10 < len(caught.value.detail) < 400
    assert caught.value.detail.isprintable()
    assert "tile" not in case or "leaves[0]" in caught.value.detail


def test_a_valid_manifest_passes() -> None:
    """What the hostile ones were made of is accepted, so each was refused for its own fault."""
    assert len(_decode(_content()).leaves) == 4
    assert _decode(_tiled()).leaves[0].tile_shape == (3,)
    assert _decode(_tiled(encoding="shared_tile", nbytes=0)).leaves[0].is_shared


def test_as_many_leaves_as_the_limit_allows() -> None:
    """60,000 leaves are read in about a second: the time grows with their number and not with its square."""
    bundle = Bundle.of_arrays({f"leaf {number}": np.int32(number) for number in range(60_000)})
    packed = encode(bundle.sealed().manifest)
    started = time.process_time()
    assert len(decode(packed, Settings()).leaves) == 60_000
    assert time.process_time() - started < 1.5


def test_one_leaf_too_many_is_refused() -> None:
    """The limit max_leaves holds."""
    packed = encode(
        Bundle.of_arrays({str(number): np.int32(number) for number in range(9)}).sealed().manifest
    )
    assert len(decode(packed, Settings(max_leaves=9)).leaves) == 9
    with pytest.raises(InvalidManifest, match="9 entries"):
        decode(packed, Settings(max_leaves=8))


@pytest.mark.parametrize("unit", [b"\x90", b"\x80", b"\x81\xa1a\x01"])
def test_a_manifest_does_not_grow_in_memory(unit: bytes) -> None:
    """8 MiB of empty lists or small maps cost less than 20 times as much while they are refused."""
    count = (8 << 20) // len(unit) // 16
    packed = b"\x81\xa6leaves\xdc\x00\x10" + (b"\xdd" + count.to_bytes(4, "big") + unit * count) * 16
    reset_peak()
    before = resident()
    with pytest.raises(InvalidManifest):
        decode(packed, Settings())
    assert peak() - before < 20 * len(packed)
