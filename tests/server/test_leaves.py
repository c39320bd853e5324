"""Single leaves over HTTP: raw or .npy, whole, by range or by slice, with an ETag that names their bytes."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import pytest

from residual_store import Bundle, open_store
from residual_store.digest import digest_of
from residual_store.dtypes import DTYPES
from residual_store.leaf import Leaf
from residual_store.manifest import Manifest
from tests.server.raw import Answer, ask
from tests.servers import Server
from tests.store.bundles import every_dtype, sharded, values_of

CUBE = np.arange(4 * 5 * 6, dtype=np.float32).reshape(4, 5, 6)
ARRAYS: dict[str, Any] = {
    "cube": CUBE,
    "scalar": np.float64(2.5),
    "empty": np.zeros((0, 3), np.int16),
    "mask": np.arange(40).reshape(8, 5) % 3 == 0,
    "constant": np.full((3, 3), 7, np.uint8),
    "tiled": np.concatenate([CUBE[:2]] * 3),
    "bfloat16": values_of("bfloat16", (4, 4)),
    "complex": np.arange(6).astype(np.complex64) * 1j,
}
NAMES = list(ARRAYS)


@pytest.fixture(scope="module")
def url(disk_server: Server) -> str:
    """A server that has the bundle leaf/a on disk."""
    with open_store(disk_server.url) as store:
        bundle = sharded(
            {name: (np.asarray(array), 3 if name == "tiled" else 1) for name, array in ARRAYS.items()}
        )
        assert {leaf.encoding for leaf in bundle.manifest.leaves} == {"raw", "bits", "constant", "tiled"}
        store.put("leaf/a", bundle)
        store.put("leaf/dtypes", every_dtype((2, 3)))
    return disk_server.url


def _leaf(
    url: str, name: str, query: str = "", headers: dict[str, str] | None = None, method: str = "GET"
) -> Answer:
    return ask(url, method, f"/v1/bundles/leaf/a/leaves/{NAMES.index(name)}{query}", None, headers)


def test_a_leaf_is_its_bytes(url: str) -> None:
    """Raw is little-endian in C order, with dtype and shape in headers."""
    for name, array in ARRAYS.items():
        answer = _leaf(url, name)
        assert (answer.status, answer.body) == (200, np.asarray(array).tobytes())
        assert answer.headers["residual-dtype"] == np.asarray(array).dtype.name
        assert answer.headers["residual-shape"] == ",".join(map(str, np.asarray(array).shape))
        assert answer.headers["content-type"] == "application/octet-stream"
        assert answer.headers["accept-ranges"] == "bytes"


@pytest.mark.parametrize("name", DTYPES)
def test_every_dtype_has_an_answer(url: str, name: str) -> None:
    """Raw always works; .npy works where numpy's own format has the dtype and is 406 elsewhere."""
    index = list(DTYPES).index(name)
    sent = every_dtype((2, 3)).array(index)
    raw = ask(url, "GET", f"/v1/bundles/leaf/dtypes/leaves/{index}")
    assert (raw.status, raw.body, raw.headers["residual-dtype"]) == (200, sent.tobytes(), name)
    npy = ask(url, "GET", f"/v1/bundles/leaf/dtypes/leaves/{index}?format=npy")
    if DTYPES[name].isbuiltin == 1:
        got = np.load(io.BytesIO(npy.body), allow_pickle=False)
        assert (got.dtype, got.shape, got.tobytes()) == (sent.dtype, sent.shape, sent.tobytes())
    else:
        assert (npy.status, npy.code) == (406, "not-acceptable")


@pytest.mark.parametrize("name", [name for name in NAMES if name != "bfloat16"])
def test_npy_is_read_by_numpy(url: str, name: str) -> None:
    """The shape is kept: () stays (), and a dimension of 0 stays."""
    answer = _leaf(url, name, "?format=npy")
    got = np.load(io.BytesIO(answer.body), allow_pickle=False)
    assert answer.headers["content-type"] == "application/x-npy"
    assert np.array_equal(got, ARRAYS[name])
    assert (got.shape, got.dtype) == (np.shape(ARRAYS[name]), np.asarray(ARRAYS[name]).dtype)


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        ("bytes=0-3", slice(0, 4)),
        ("bytes=5-5", slice(5, 6)),
        ("bytes=100-", slice(100, None)),
        ("bytes=-7", slice(-7, None)),
        ("bytes=470-99999", slice(470, 480)),
        ("bytes=-99999", slice(0, 480)),
        ("bytes=479-", slice(479, 480)),
    ],
)
def test_a_range_is_a_part(url: str, asked: str, expected: slice) -> None:
    """206 with the bytes of the range, and Content-Range says which."""
    answer = _leaf(url, "cube", headers={"Range": asked})
    whole = CUBE.tobytes()
    start, stop, _ = expected.indices(480)
    assert (answer.status, answer.body) == (206, whole[expected])
    assert answer.headers["content-range"] == f"bytes {start}-{stop - 1}/480"
    assert answer.headers["etag"] == _leaf(url, "cube").headers["etag"]


@pytest.mark.parametrize("asked", ["bytes=480-", "bytes=500-600", "bytes=-0"])
def test_a_range_outside_is_refused(url: str, asked: str) -> None:
    """416 says how long the leaf is, in the header that RFC 9110 names."""
    answer = _leaf(url, "cube", headers={"Range": asked})
    assert (answer.status, answer.code) == (416, "range-not-satisfiable")
    assert answer.headers["content-range"] == "bytes */480"


@pytest.mark.parametrize(
    "asked", ["items=0-3", "bytes", "bytes=a-b", "bytes=0-3,5-7", "bytes=-", "bytes=9-3"]
)
def test_a_range_that_is_not_understood_is_ignored(url: str, asked: str) -> None:
    """Other units, several ranges and nonsense give the whole leaf."""
    answer = _leaf(url, "cube", headers={"Range": asked})
    assert (answer.status, answer.body) == (200, CUBE.tobytes())


def test_an_etag_saves_a_download(url: str) -> None:
    """If-None-Match with the ETag, with several, as a weak one or with * is 304 without a body; another one is 200."""
    tag = _leaf(url, "cube").headers["etag"]
    assert tag.startswith('"')
    for matching in (tag, f'"x", {tag}', f"W/{tag}", "*"):
        answer = _leaf(url, "cube", headers={"If-None-Match": matching})
        assert (answer.status, answer.body, answer.headers["etag"]) == (304, b"", tag)
    assert _leaf(url, "cube", headers={"If-None-Match": '"other"'}).status == 200


def test_an_etag_names_the_bytes(url: str) -> None:
    """Two forms or two slices of a leaf have different ETags, equal bytes have equal ones."""
    queries = ("", "?slice=0", "?slice=1", "?format=npy")
    tags = [_leaf(url, "cube", query).headers["etag"] for query in queries]
    assert len(set(tags)) == 4
    assert [_leaf(url, "cube", query).headers["etag"] for query in queries] == tags


def test_if_range_keeps_two_downloads_apart(url: str) -> None:
    """With the ETag a range is a range; with an old or a weak one the whole leaf comes."""
    tag = _leaf(url, "cube").headers["etag"]
    for condition, status in (
        (tag, 206),
        ('"old"', 200),
        (f"W/{tag}", 200),
        ("Sat, 29 Oct 1994 19:43:31 GMT", 200),
    ):
        answer = _leaf(url, "cube", headers={"Range": "bytes=0-3", "If-Range": condition})
        assert answer.status == status, condition


@pytest.mark.parametrize(
    "text",
    [
        "0",
        "-1",
        "1:3",
        ":2",
        "2:",
        ":",
        "0,1",
        "1:3,:,2",
        ":,:,5",
        "-2:,1:4,-1",
        "3,4,5",
        "2:1",
        ":99",
        "0:0",
    ],
)
def test_a_slice_is_that_of_numpy(url: str, text: str) -> None:
    """The bytes and the shape are those that numpy gives for the same slice."""
    expected = np.asarray(eval(f"CUBE[{text}]", {"CUBE": CUBE}))
    for query in (f"?slice={text}", f"?slice={text}&format=npy"):
        answer = _leaf(url, "cube", query)
        assert answer.status == 200
        assert answer.headers["residual-shape"] == ",".join(map(str, expected.shape))
        assert answer.body.endswith(expected.tobytes())
    assert answer.body == b"" or np.array_equal(np.load(io.BytesIO(answer.body)), expected)


@pytest.mark.parametrize(
    "text", ["4", "-5", "0,0,0,0", "a", "0:1:2", "1e3", "...", "None", ",", "0,", "9" * 300, "0;1", "%00"]
)
def test_a_slice_that_is_none_is_refused(url: str, text: str) -> None:
    """Outside the leaf, of too many parts or of another form, it is 422 and never a failure."""
    answer = _leaf(url, "cube", f"?slice={text}")
    assert (answer.status, answer.code) == (422, "invalid-option")


def test_a_slice_of_a_scalar_is_refused(url: str) -> None:
    """A leaf of rank 0 has nothing to slice."""
    assert _leaf(url, "scalar", "?slice=0").status == 422


def test_head_is_get_without_a_body(url: str) -> None:
    """HEAD has the same headers, the length included, and no body."""
    for query in ("", "?format=npy", "?slice=1:3"):
        for headers in ({}, {"Range": "bytes=0-3"}):
            one, other = (_leaf(url, "cube", query, headers, method) for method in ("GET", "HEAD"))
            assert other.body == b""
            assert other.status == one.status
            assert {**other.headers, "date": ""} == {**one.headers, "date": ""}


def test_a_leaf_that_no_memory_holds_is_refused(memory_server: Server) -> None:
    """A few bytes can stand for any number of them, by a constant or by equal shards."""
    leaf = Leaf(
        index=0,
        channel="opaque_residuals",
        path="h",
        dtype="float32",
        shape=(1 << 40,),
        encoding="constant",
        nbytes=4,
        digest=digest_of(bytes(4)),
    )
    bundle = Bundle(manifest=Manifest(leaves=(leaf,)), payloads=(np.zeros(4, np.uint8),))
    with open_store(memory_server.url) as store:
        store.put("leaf/huge", bundle)
    for query in ("", "?format=npy", "?slice=0:2"):
        answer = ask(memory_server.url, "GET", f"/v1/bundles/leaf/huge/leaves/0{query}")
        assert (answer.status, answer.code) == (413, "too-large")
        assert "leaf 0 (h) of 'leaf/huge' has 4398046511104 bytes" in answer.body.decode()


def test_head_and_range_have_the_headers_of_the_body(url: str) -> None:
    """A HEAD has the length and no body, and a part of a large leaf its bounds."""
    whole = _leaf(url, "cube")
    head = _leaf(url, "cube", method="HEAD")
    assert (head.status, head.body, head.headers["content-length"]) == (200, b"", str(CUBE.nbytes))
    assert head.headers["etag"] == whole.headers["etag"]
    large = np.random.default_rng(0).random(1 << 19)
    with open_store(url) as store:
        store.put("leaf/large", Bundle.of_arrays({"h": large}))
    path = "/v1/bundles/leaf/large/leaves/0"
    assert ask(url, "GET", path).body == large.tobytes()
    part = ask(url, "GET", path, None, {"Range": f"bytes=5-{3 << 20}"})
    assert (part.status, part.body) == (206, large.tobytes()[5 : (3 << 20) + 1])
    assert part.headers["content-range"] == f"bytes 5-{3 << 20}/{large.nbytes}"
