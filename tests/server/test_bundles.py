"""Bundles over HTTP: what is answered, what is stored, and how many requests and files that takes."""

from __future__ import annotations

import itertools
import json
import random
import re
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import pytest
from hypothesis import given, settings

from residual_store import Bundle, open_store
from residual_store.errors import DataLoss
from residual_store.frame import MEDIA_TYPE
from tests.server.raw import ask, frame_of
from tests.servers import Server, running_server
from tests.store.bundles import assert_equal, noise
from tests.store.plain import assert_stored
from tests.store.roots import data_files
from tests.store.strategies import bundles

_NUMBERS = itertools.count()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server on disk for which 64 bytes are a large leaf and 256 a chunk, so that small bundles use all of the format."""
    environment = {"RESIDUAL_STORE_PACKED_LEAF_BYTES": "64", "RESIDUAL_STORE_CHUNK_BYTES": "256"}
    with running_server(root=tmp_path_factory.mktemp("bundles"), environment=environment) as server:
        yield server


@settings(deadline=None, max_examples=80)
@given(bundle=bundles())
def test_any_bundle_is_answered_and_stored(server: Server, bundle: Bundle) -> None:
    """The frame that comes back has the bytes of the frame that was sent, and plain tensorstore finds them on disk."""
    assert server.root is not None
    key, frame = f"any/{next(_NUMBERS)}", frame_of(bundle)
    assert ask(server.url, "PUT", f"/v1/bundles/{key}", frame).status == 201
    answer = ask(server.url, "GET", f"/v1/bundles/{key}")
    assert (answer.status, answer.body) == (200, frame)
    assert_stored(server.root, key, bundle, packed_below=64)
    with open_store(server.url) as store:
        assert_equal(store.get(key), bundle)
        for leaf in bundle.manifest.leaves:
            assert store.get_leaf(key, leaf.index).tobytes() == bundle.array(leaf.index).tobytes()
        store.delete(key)
    assert data_files(server.root, key) == []


def test_a_put_says_whether_it_is_new(server: Server) -> None:
    """201 for a new bundle, 200 for the very same one again, 409 for another one, 201 for a replacement."""
    one, other = frame_of(noise(100)), frame_of(noise(100, seed=1))
    answers = [
        ask(server.url, "PUT", "/v1/bundles/put/a", body).status
        if not query
        else ask(server.url, "PUT", f"/v1/bundles/put/a?{query}", body).status
        for body, query in [
            (one, ""),
            (one, ""),
            (other, ""),
            (other, "if_exists=replace"),
            (one, "if_exists=same"),
        ]
    ]
    assert answers == [201, 200, 409, 201, 409]


def test_the_headers_of_a_bundle(server: Server) -> None:
    """GET and HEAD say the same of length, type and ETag; Residual-Stat is what stat gives."""
    frame = frame_of(noise(5000))
    ask(server.url, "PUT", "/v1/bundles/head/a", frame)
    got, head = (ask(server.url, method, "/v1/bundles/head/a") for method in ("GET", "HEAD"))
    assert (head.status, head.body, head.headers["content-length"]) == (200, b"", str(len(frame)))
    assert head.headers["content-type"] == got.headers["content-type"] == MEDIA_TYPE
    with open_store(server.url) as store:
        stat = store.stat("head/a")
    assert json.loads(head.headers["residual-stat"]) == asdict(stat)
    for name in ("etag", "content-length"):
        assert got.headers[name] == head.headers[name]


def test_the_manifest_comes_as_it_is_asked_for(server: Server) -> None:
    """JSON by default, msgpack by Accept, with the same fields."""
    ask(server.url, "PUT", "/v1/bundles/manifest/a", frame_of(noise(50, 70)))
    plain = ask(server.url, "GET", "/v1/bundles/manifest/a/manifest")
    packed = ask(
        server.url, "GET", "/v1/bundles/manifest/a/manifest", headers={"Accept": "application/msgpack"}
    )
    assert plain.headers["content-type"] == "application/json"
    assert packed.headers["content-type"] == "application/msgpack"
    with open_store(server.url) as store:
        manifest = store.manifest("manifest/a")
    assert [leaf["digest"] for leaf in plain.json["leaves"]] == [
        leaf.digest.hex() for leaf in manifest.leaves
    ]
    assert plain.json["created"] == manifest.created
    assert plain.headers["vary"] == packed.headers["vary"] == "Accept"


@pytest.mark.parametrize(
    ("accept", "kind"),
    [
        ("application/msgpack, */*", "msgpack"),
        ("APPLICATION/MSGPACK", "msgpack"),
        ("application/json;q=0.2, application/msgpack;q=0.9", "msgpack"),
        ("application/json, application/msgpack;q=0", "json"),
        ("application/json, application/msgpack; q=0.1", "json"),
        ("application/msgpack-ext", "json"),
        ("*/*", "json"),
        (";;,q=,", "json"),
    ],
)
def test_the_manifest_comes_as_it_is_liked_best(server: Server, accept: str, kind: str) -> None:
    """By the weights of Accept (RFC 9110, 12.5.1)."""
    ask(server.url, "PUT", "/v1/bundles/manifest/accept", frame_of(noise(50, 70)))
    answer = ask(server.url, "GET", "/v1/bundles/manifest/accept/manifest", headers={"Accept": accept})
    assert (answer.status, answer.headers["content-type"]) == (200, f"application/{kind}")


def _requests(url: str) -> float:
    text = ask(url, "GET", "/metrics").body.decode()
    return sum(
        float(number) for number in re.findall(r"^residual_store_requests_total\{.*\} (.*)$", text, re.M)
    )


def test_one_request_each_way(disk_server: Server) -> None:
    """A bundle of 1,000 leaves of 4 KiB is one request up, one down, and one for its stat."""
    server = disk_server
    bundle = noise(*[4096] * 1000)
    with open_store(server.url) as store:
        before = _requests(server.url)
        store.put("many/a", bundle)
        after_put = _requests(server.url)
        assert_equal(store.get("many/a"), bundle)
        after_get = _requests(server.url)
        store.stat("many/a")
        after_stat = _requests(server.url)
    # Each count includes the request for the count before it.
    assert [after_put - before, after_get - after_put, after_stat - after_get] == [2, 2, 2]


def test_damage_on_disk_is_data_loss(tmp_path: Path) -> None:
    """A deleted, cut or flipped file is 500 with the code data-loss, for the bundle and its leaves, and never data."""
    bundle, chance = noise(2 << 20, 70_000, 50), random.Random(2)
    with running_server(root=tmp_path) as server, open_store(server.url) as store:
        for number in range(12):
            key = f"damage/{number}"
            store.put(key, bundle)
            path = chance.choice(data_files(tmp_path, key))
            whole = path.read_bytes()
            match number % 3:
                case 0:
                    path.unlink()
                case 1:
                    path.write_bytes(whole[: chance.randrange(len(whole))])
                case 2:
                    place = whole.index(bundle.payloads[0].tobytes()[:64]) if len(whole) > 1000 else 9
                    path.write_bytes(whole[:place] + bytes([whole[place] ^ 16]) + whole[place + 1 :])
            answer = ask(server.url, "GET", f"/v1/bundles/{key}")
            assert (answer.status, answer.code) == (500, "data-loss")
            assert key in answer.json["detail"]
            assert "leaf" in answer.json["detail"] or "leaves" in answer.json["detail"]
            with pytest.raises(DataLoss):
                store.get(key)
            with pytest.raises(DataLoss):
                store.get_leaf(key, 0)


def test_an_error_does_not_tell_where_the_root_is(tmp_path: Path) -> None:
    """The path of a damaged file is for the log and not for whoever asks over the network."""
    with (
        running_server(root=tmp_path / "root", log=tmp_path / "log") as server,
        open_store(server.url) as store,
    ):
        store.put("damage/a", noise(50))
        for path in data_files(tmp_path / "root", "damage/a"):
            path.write_bytes(b"damaged")
        assert str(tmp_path).encode() not in ask(server.url, "GET", "/v1/bundles/damage/a").body
    assert "data-loss" in (tmp_path / "log").read_text()


def test_a_listing_of_two_thousand(server: Server) -> None:
    """Pages of up to 1,000 entries, each once and in order, while a bundle is added to a page that has gone by."""
    frame = frame_of(noise(1))
    for number in range(2000):
        ask(server.url, "PUT", f"/v1/bundles/list/{number:04}?durability=host", frame)
    keys: list[str] = []
    target: str | None = "/v1/bundles?prefix=list/&limit=700"
    while target is not None:
        page = ask(server.url, "GET", target).json
        keys += [entry["key"] for entry in page["entries"]]
        ask(server.url, "PUT", "/v1/bundles/list/-early?durability=host", frame)
        target = page["next"] and f"/v1/bundles?prefix=list/&limit=700&after={page['next']}"
    assert keys == [f"list/{number:04}" for number in range(2000)]
    assert ask(server.url, "DELETE", "/v1/bundles?prefix=list/").json["deleted"] >= 2000
