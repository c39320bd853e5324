"""Direct answers: a thread writes to who takes the bytes at once, and the event loop to everybody else."""

from __future__ import annotations

import concurrent.futures
import contextlib
import http.client
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from residual_store import Bundle, Store, open_store
from residual_store.frame import MEDIA_TYPE
from tests.server.raw import Connection, ask, frame_of, head_of
from tests.servers import Server, running_server, until
from tests.store.bundles import assert_equal, noise

MIB = 1 << 20


@pytest.fixture(params=["memory_server", "unix_server"])
def server(request: pytest.FixtureRequest) -> Server:
    """One over TCP and one over a unix socket."""
    server: Server = request.getfixturevalue(request.param)
    return server


@pytest.fixture
def store(server: Server) -> Iterator[Store]:
    """A client whose bundles travel in bodies."""
    with open_store(server.url, segments=False) as store:
        yield store


@pytest.fixture
def bundle(store: Store) -> Iterator[Bundle]:
    """One of 24 MiB under ``direct/a``."""
    bundle = noise(24 * MIB)
    store.put("direct/a", bundle, durability="host")
    yield bundle
    store.delete("direct/a")


def test_every_answer_on_a_connection_is_whole(store: Store, bundle: Bundle) -> None:
    """Large and small ones in turn, each in its place."""
    small = noise(100)
    store.put("direct/small", small, durability="host")
    for _ in range(5):
        assert_equal(store.get("direct/a"), bundle)
        assert_equal(store.get("direct/small"), small)
    store.delete("direct/small")


def test_requests_may_be_sent_before_the_answers_are_read(server: Server, bundle: Bundle) -> None:
    """The answers come in the order of the requests."""
    with Connection(server.url) as connection, connection.socket.makefile("rb") as answers:
        connection.send(head_of("GET", "/v1/bundles/direct/a") * 2, head_of("GET", "/v1/capabilities"))
        for wanted in (MEDIA_TYPE, MEDIA_TYPE, "application/json"):
            assert answers.readline().startswith(b"HTTP/1.1 200")
            headers = http.client.parse_headers(answers)
            assert headers["content-type"] == wanted
            body = answers.read(int(headers["content-length"]))
            assert (body == frame_of(bundle)) == (wanted == MEDIA_TYPE)


def test_a_slow_reader_gets_all_of_it_and_holds_nobody_up(server: Server, bundle: Bundle) -> None:
    """More readers than there are threads ask and do not read, while others are served; then they read."""
    connections = [Connection(server.url) for _ in range(3 * (os.cpu_count() or 1))]
    for connection in connections:
        connection.send(head_of("GET", "/v1/bundles/direct/a"))
    with open_store(server.url, segments=False) as other:
        for _ in range(20):
            assert_equal(other.get("direct/a"), bundle)
    for connection in connections:
        with connection:
            assert connection.answer().body == frame_of(bundle)


def test_many_readers_at_once_get_all_of_it(server: Server, bundle: Bundle) -> None:
    """Whoever finds no thread is served by the event loop."""

    def read(_: int) -> None:
        with open_store(server.url, segments=False) as other:
            for _ in range(5):
                assert_equal(other.get("direct/a"), bundle)

    with concurrent.futures.ThreadPoolExecutor(8) as readers:
        list(readers.map(read, range(8)))


def test_who_goes_away_leaves_nothing_behind(server: Server, store: Store, bundle: Bundle) -> None:
    """Whether nothing of the answer was read or a part, its memory comes back, and the server goes on."""
    before = store.usage().host_held_bytes
    for taken in (0, 100, 3 * MIB):
        with Connection(server.url) as connection:
            connection.send(head_of("GET", "/v1/bundles/direct/a"))
            while taken > 0:
                taken -= len(connection.socket.recv(taken))
    assert_equal(store.get("direct/a"), bundle)
    store.delete("direct/a")
    until(lambda: store.usage().host_held_bytes <= before - 24 * MIB)
    store.put("direct/a", bundle, durability="host")


def test_what_was_sent_is_counted(server: Server, bundle: Bundle) -> None:
    """Once, whichever way it went."""
    before = _sent(server)
    with Connection(server.url) as connection:
        connection.send(head_of("GET", "/v1/bundles/direct/a"))
        nbytes = len(connection.answer().body)
    until(lambda: _sent(server) >= before + nbytes)
    assert _sent(server) < before + 1.1 * nbytes


def _sent(server: Server) -> float:
    lines = ask(server.url, "GET", "/metrics").body.decode().splitlines()
    (line,) = [line for line in lines if line.startswith("residual_store_sent_bytes_total")]
    return float(line.split()[-1])


@pytest.mark.parametrize("mib", [1, 24])
def test_an_answer_to_who_is_gone_is_no_fault(tmp_path: Path, mib: int) -> None:
    """A client waits for a bundle and is gone when that comes: the server logs nothing, and has its memory again."""
    log = tmp_path / "log"
    with running_server(log=log) as server, open_store(server.url, segments=False) as store:
        store.usage()
        before = _sockets(server)
        with Connection(server.url) as connection:
            connection.send(head_of("GET", "/v1/bundles/direct/late?wait=30"))
            until(lambda: _sockets(server) == before + 1)
        until(lambda: _sockets(server) == before)
        store.put("direct/late", noise(mib * MIB))
        store.delete("direct/late")
        until(lambda: store.usage().host_held_bytes == 0)
    assert log.read_text() == ""


def _sockets(server: Server) -> int:
    names = []
    for descriptor in Path(f"/proc/{server.process.pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            names.append(str(descriptor.readlink()))
    return sum(name.startswith("socket:") for name in names)
