"""The store over HTTP when things go wrong on the way: lost answers, cut answers, redirects, and peers that are none."""

from __future__ import annotations

import contextlib
import json
import socket
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from residual_store import Bundle, Settings, Store, open_store
from residual_store.errors import (
    ERRORS,
    Busy,
    InvalidOption,
    NotFound,
    ResidualStoreError,
    Stopping,
    Unreachable,
    UploadStalled,
)
from residual_store.frame import frame_head
from tests.servers import Server, running_server
from tests.store.bundles import assert_equal, noise
from tests.store.proxy import proxy, scripted

ONCE = Settings(attempts=1)
CUT = noise(100_000, 10)


def _problem(status: int, code: str, **fields: object) -> bytes:
    body = json.dumps({"status": status, "code": code, "detail": "because", **fields}).encode()
    head = f"HTTP/1.1 {status} X\r\nContent-Type: application/problem+json\r\nContent-Length: {len(body)}\r\n\r\n"
    return head.encode() + body


# A network that loses things


def test_a_put_whose_answer_was_lost_is_stored_once(memory_server: Server) -> None:
    """The client sends it again by itself, and the receipt says that it was there."""
    bundle = noise(100_000)
    with proxy(memory_server.port) as way, open_store(way.url) as store:
        way.lose_answers = 2
        receipt = store.put("lost/put", bundle)
        assert receipt.existed
        assert len([head for head in way.heads if head.startswith(b"PUT ")]) == 3
        assert_equal(store.get("lost/put"), bundle)


def test_a_large_put_whose_answer_was_lost_is_stored_once(memory_server: Server) -> None:
    """Above 1 MiB, where the client asks before it sends, a lost answer is no loss either."""
    bundle = noise(3 << 20)
    with proxy(memory_server.port) as way, open_store(way.url) as store:
        way.lose_answers = 1
        assert store.put("lost/large", bundle).existed
        assert_equal(store.get("lost/large"), bundle)


def test_a_delete_whose_answer_was_lost_is_a_delete(memory_server: Server) -> None:
    """The 404 of the second attempt is not taken for a missing bundle; a first 404 is."""
    with proxy(memory_server.port) as way, open_store(way.url) as store:
        store.put("lost/delete", noise(10))
        store.close()
        way.lose_answers = 1
        store.delete("lost/delete")
        with pytest.raises(NotFound):
            store.delete("lost/delete")


@pytest.mark.parametrize("length", [0, 10, 150, 4000, 50_000])
def test_a_get_that_was_cut_is_made_again(memory_server: Server, length: int) -> None:
    """An answer that ends in its head, its manifest or a leaf is never taken for a bundle."""
    bundle = CUT
    with open_store(memory_server.url) as store:
        store.put("lost/get", bundle)
    with proxy(memory_server.port) as way, open_store(way.url) as store:
        way.cut_answers_after = [length, length]
        assert_equal(store.get("lost/get"), bundle)
        assert len(way.heads) == 3
        store.close()
        way.cut_answers_after = [length] * 9
        with open_store(way.url, settings=ONCE) as hasty, pytest.raises(Unreachable):
            hasty.get("lost/get")


@pytest.mark.parametrize("call", ["put", "manifest", "usage", "list"])
def test_an_answer_that_was_cut_in_its_head_is_asked_for_again(memory_server: Server, call: str) -> None:
    """A head that ends after the status or between two fields says nothing yet, although the HTTP library takes it for whole."""
    key, bundle = f"cut/in-{call}", noise(10)
    calls: dict[str, Callable[[Store], object]] = {
        "put": lambda store: store.put(key, bundle),
        "manifest": lambda store: store.manifest(key),
        "usage": lambda store: store.usage(),
        "list": lambda store: store.list(),
    }
    with proxy(memory_server.port) as way, open_store(way.url, settings=Settings(attempts=3)) as store:
        store.put(key, bundle)
        store.close()
        way.heads.clear()
        way.cut_answers_after = [len("HTTP/1.1 200 OK\r\n"), len("HTTP/1.1 200 OK\r\ndate: ")]
        calls[call](store)
        assert len(way.heads) == 3


def test_nobody_answers(tmp_path: Path) -> None:
    """A client of a server that is not there gets Unreachable with the URL."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
    for place in (url, f"unix://{tmp_path / 'socket'}"):
        with open_store(place, settings=ONCE) as store, pytest.raises(Unreachable) as caught:
            store.get("run/a")
        assert place in str(caught.value)
        assert "is the server running" in str(caught.value)


def test_a_token_is_sent_without_white_space_and_never_shown(memory_server: Server) -> None:
    """A file's last line break is left out; what no header can carry is refused before anything is sent."""
    with open_store(memory_server.url, token="secret\n") as store:
        assert store.list(prefix="nothing/").entries == ()
    for token in ("", "\n", "sec\nret", "secret\x00", "sécret"):
        with pytest.raises(InvalidOption, match="the token") as refusal:
            open_store(memory_server.url, token=token)
        assert "ret" not in str(refusal.value).replace("carry", "")


@pytest.mark.parametrize("path", ["/v1", "/v1/", "/v1/bundles", "/base/v1/bundles/run/a"])
def test_the_url_of_a_route_is_no_store(path: str) -> None:
    """It would be found out at the first request only, by an answer that says nothing of the URL."""
    with pytest.raises(InvalidOption, match="leave it out"):
        open_store(f"http://127.0.0.1:1{path}")
    with pytest.raises(InvalidOption, match="settings is a dict"):
        open_store("memory://", settings={})  # type: ignore[arg-type]


def test_a_server_that_says_nothing_is_given_up(memory_server: Server) -> None:
    """After idle_answer_seconds without a byte the call ends with Unreachable."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        settings = Settings(attempts=1, idle_answer_seconds=0.2)
        with open_store(url, settings=settings) as store, pytest.raises(Unreachable):
            store.stat("run/a")


def test_a_host_that_does_not_answer_is_given_up() -> None:
    """It is after connect_seconds, and not only after the longer time that an answer may take."""
    settings = Settings(attempts=1, connect_seconds=0.2, idle_answer_seconds=120)
    with socket.create_server(("127.0.0.1", 0), backlog=0) as full, contextlib.ExitStack() as queue:
        for _ in range(2):
            waiting = queue.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex(full.getsockname())
        with (
            open_store(f"http://127.0.0.1:{full.getsockname()[1]}", settings=settings) as store,
            ThreadPoolExecutor(1) as thread,
        ):
            assert isinstance(thread.submit(store.stat, "run/a").exception(60), Unreachable)


@pytest.mark.parametrize("names", [1, 5000], ids=["a short head", "a head above 1 MiB"])
def test_what_is_given_up_and_changed_is_not_stored(memory_server: Server, names: int) -> None:
    """The kernel may read leaves from where they lie after the client has gone; the server refuses them by their digests, which
    stand in the head, and that is copied."""
    array = np.random.default_rng(0).random(1 << 18)
    small = {f"{name:0100}": np.array([name, 0.5]) for name in range(names)}
    bundle = Bundle.of_arrays({"h": array, **small})
    head = frame_head(bundle.sealed().manifest)
    with socket.create_server(("127.0.0.1", 0)) as slow:
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4 << 20)
        url = f"http://127.0.0.1:{slow.getsockname()[1]}"
        settings = Settings(attempts=1, idle_answer_seconds=0.5)
        with open_store(url, settings=settings, segments=False) as store, pytest.raises(Unreachable):
            store.put("given/up", bundle)
        array += 1
        others = [frame_head(Bundle.of_arrays({"h": array, **small}).sealed().manifest) for _ in range(3)]
        with slow.accept()[0] as connection:
            request = b"".join(iter(lambda: connection.recv(1 << 20), b""))
    assert head in request
    assert not any(other in request for other in others)
    assert array[: 1 << 16].tobytes() in request, "nothing was sent by reference"
    with socket.create_connection(("127.0.0.1", memory_server.port)) as late:
        late.sendall(request.replace(b"Expect: 100-continue\r\n", b""))
        assert late.recv(1 << 16).startswith(b"HTTP/1.1 400 ")
    with open_store(memory_server.url) as store, pytest.raises(NotFound):
        store.stat("given/up")


def test_a_restarted_server_is_found_again(tmp_path: Path) -> None:
    """Idle connections to a server that has gone are not used for the next request."""
    bundle = noise(1000)
    with running_server(root=tmp_path) as server:
        store = open_store(server.url)
        store.put("restart/a", bundle)
        port = server.port
    with running_server(root=tmp_path, options=["--port", str(port)]), store:
        assert_equal(store.get("restart/a"), bundle)


# Answers of all kinds


@pytest.mark.parametrize("code", [code for code, kind in ERRORS.items() if kind.status is not None])
def test_every_code_is_raised_as_its_class(code: str) -> None:
    """Each problem becomes the exception of the table, with its text and its fields."""
    answer = _problem(ERRORS[code].status or 0, code, key="run/a", leaf="h")
    with (
        scripted(answer) as peer,
        open_store(peer.url, settings=ONCE) as store,
        pytest.raises(ResidualStoreError) as caught,
    ):
        store.get("run/a")
    assert type(caught.value) is ERRORS[code]
    assert caught.value.detail == "because"
    assert caught.value.fields["leaf"] == "h"


def test_busy_and_stopping_are_tried_again(memory_server: Server) -> None:
    """They are, with the pause that the server asked for, and at last they are raised."""
    for status, code, kind in ((429, "busy", Busy), (503, "stopping", Stopping)):
        refusal = _problem(status, code, retry_after=0.01)
        with scripted(*[refusal] * 9) as peer, open_store(peer.url, settings=Settings(attempts=3)) as store:
            with pytest.raises(kind):
                store.put("run/a", noise(10))
            assert len(peer.heads) == 3
    assert UploadStalled.status == 408


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
def test_a_redirect_is_not_followed(status: int) -> None:
    """No other origin hears of the token, and the error does not repeat it."""
    with scripted() as elsewhere:
        answer = (
            f"HTTP/1.1 {status} X\r\nLocation: {elsewhere.url}/v1/bundles/run/a\r\nContent-Length: 0\r\n\r\n"
        )
        with (
            scripted(answer.encode()) as peer,
            open_store(peer.url, token="s3cret", settings=ONCE) as store,
            pytest.raises(InvalidOption, match="redirect") as caught,
        ):
            store.get("run/a")
        assert b"s3cret" in peer.heads[0]
        assert elsewhere.heads == []
        assert "s3cret" not in str(caught.value) + repr(caught.value) + repr(store)


_CALLS: dict[str, Callable[[Store], object]] = {
    "get": lambda store: store.get("run/a"),
    "get_leaf": lambda store: store.get_leaf("run/a", 0),
    "manifest": lambda store: store.manifest("run/a"),
    "stat": lambda store: store.stat("run/a"),
    "list": lambda store: store.list(),
    "put": lambda store: store.put("run/a", noise(10)),
    "touch": lambda store: store.touch("run/a", ttl=5),
    "usage": lambda store: store.usage(),
    "delete_prefix": lambda store: store.delete_prefix("run/"),
    "get_program": lambda store: store.get_program("a" * 64),
}


_ANSWERS = {
    "a page": b"HTTP/1.1 200 OK\r\nContent-Type: text/html\r\nContent-Length: 12\r\n\r\n<html></html",
    "an empty object": b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 2\r\n\r\n{}",
    "nothing": b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n",
    "a bad gateway": b"HTTP/1.1 502 Bad Gateway\r\nContent-Length: 5\r\n\r\nsorry",
    "a null": b"HTTP/1.1 404 Not Found\r\nContent-Type: application/json\r\nContent-Length: 4\r\n\r\nnull",
    "another protocol": b"SSH-2.0-OpenSSH_9.6\r\n",
    "too many headers": b"HTTP/1.1 200 OK\r\n" + b"A: b\r\n" * 200 + b"\r\n",
}


@pytest.mark.parametrize("call", _CALLS)
@pytest.mark.parametrize("answer", _ANSWERS)
def test_a_peer_that_is_no_server_of_ours(call: str, answer: str) -> None:
    """Whatever it answers, the call ends with an error of this project."""
    with (
        scripted(_ANSWERS[answer]) as peer,
        open_store(peer.url, settings=ONCE) as store,
        pytest.raises(ResidualStoreError),
    ):
        _CALLS[call](store)
