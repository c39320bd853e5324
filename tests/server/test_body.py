"""Bodies: whatever a client does with its upload, it is stored whole or leaves nothing, and the answer says why."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator

import numpy as np
import pytest

from residual_store import Bundle, open_store
from residual_store.errors import Busy, NotFound
from tests.server.raw import Answer, Connection, ask, frame_of, head_of
from tests.servers import Server, running_server, until
from tests.store.bundles import assert_equal, noise

MIB = 1 << 20
BUNDLE = noise(3 * MIB, 100, seed=4)
FRAME = frame_of(BUNDLE)


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    """A small server in memory: bundles up to 10 MiB in 24 MiB of memory, and a short patience."""
    environment = {
        "RESIDUAL_STORE_IDLE_BODY_SECONDS": "0.4",
        "RESIDUAL_STORE_MAX_BUNDLE_BYTES": str(10 * MIB),
        "RESIDUAL_STORE_MAX_PROGRAM_BYTES": str(MIB),
        "RESIDUAL_STORE_HOST_BYTES": str(24 * MIB),
    }
    with running_server(environment=environment) as server:
        yield server


@pytest.fixture(autouse=True)
def nothing_is_left(server: Server) -> Iterator[None]:
    """After each test the server holds no bundle and no memory, whatever the client did."""
    yield
    with open_store(server.url) as store:
        store.delete_prefix("body/")
        until(lambda: store.usage().host_held_bytes == 0, what="the return of all memory")


def _put(server: Server, body: bytes, headers: dict[str, str] | None = None, key: str = "body/a") -> Answer:
    return ask(server.url, "PUT", f"/v1/bundles/{key}", body, headers)


def _is_absent(server: Server, key: str = "body/a") -> bool:
    return ask(server.url, "GET", f"/v1/bundles/{key}").status == 404


def _chunked(body: bytes, size: int = 100_000) -> bytes:
    parts = [body[start : start + size] for start in range(0, len(body), size)]
    return b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in parts) + b"0\r\n\r\n"


# Headers


@pytest.mark.parametrize(
    "kind", ["application/json", "multipart/form-data; boundary=x", "text/plain", "image/png", "a" * 5000]
)
def test_another_content_type_is_refused(server: Server, kind: str) -> None:
    """A body that says it is something else is 415, and neither it nor its type is echoed at length."""
    answer = _put(server, b"\x80\xffsecret" * 100, {"Content-Type": kind})
    assert (answer.status, answer.code) == (415, "unsupported-media")
    assert b"secret" not in answer.body
    assert len(answer.body) < 600


@pytest.mark.parametrize(
    "kind",
    ["application/octet-stream", "application/vnd.residual-store.frame", "Application/Octet-Stream; x=y"],
)
def test_a_binary_content_type_is_accepted(server: Server, kind: str) -> None:
    """A frame as octets or by its own name is stored."""
    assert _put(server, FRAME, {"Content-Type": kind}).status == 201


@pytest.mark.parametrize("coding", ["gzip", "zstd", "br", "deflate", "identity, gzip", "x-unknown"])
def test_a_coded_body_is_refused(server: Server, coding: str) -> None:
    """Encoded bytes are never stored as if they were plain."""
    answer = _put(server, FRAME, {"Content-Encoding": coding})
    assert (answer.status, answer.code) == (415, "unsupported-media")
    assert _is_absent(server)


def test_a_coded_transfer_is_refused(server: Server) -> None:
    """Nobody decodes it, so what is stored would not be what was meant."""
    headers = {"Transfer-Encoding": "gzip, chunked", "Content-Type": "application/octet-stream"}
    with Connection(server.url) as connection:
        connection.send(head_of("PUT", "/v1/bundles/body/a", headers), _chunked(FRAME))
        answer = connection.answer()
    assert (answer.status, answer.code) == (415, "unsupported-media")
    assert _is_absent(server)


@pytest.mark.parametrize("size", [100, 100_000])
def test_an_offer_of_another_protocol_is_ignored(server: Server, size: int) -> None:
    """As curl --http2 and Java's client make with each request; the connection goes on with HTTP/1.1."""
    offer = {"Connection": "Upgrade, HTTP2-Settings", "upgrade": "h2c", "HTTP2-Settings": "AAMAAABkAAQ"}
    frame = frame_of(Bundle.of_arrays({"upgrade:": np.arange(size)}))
    with Connection(server.url) as connection:
        for status in (201, 200):
            connection.send(
                head_of("PUT", f"/v1/bundles/body/h2-{size}", {**offer, "Content-Length": str(len(frame))}),
                frame,
            )
            assert connection.answer().status == status
        connection.send(head_of("GET", f"/v1/bundles/body/h2-{size}", offer))
        assert connection.answer().body == frame


def test_a_body_that_looks_like_an_offer_is_stored_as_it_is(server: Server) -> None:
    """Whatever the packets are in which head and body come."""
    program = b"\r\nUpgrade: h2c\r\nPUT / HTTP/1.1\r\nUpgrade: h2c\r\n\r\n" * 20
    head = {"Content-Length": str(len(program)), "Content-Type": "application/octet-stream"}
    for number, cut in enumerate((-4, -3, -2, -1, 0, 1, 50)):
        fingerprint = f"{number:064x}"
        sent = head_of("PUT", f"/v1/programs/{fingerprint}", head)
        whole, at = sent + program, len(sent) + cut
        with Connection(server.url) as connection:
            connection.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection.send(whole[:at])
            ask(server.url, "GET", "/healthz")
            connection.send(whole[at:])
            assert connection.answer().status == 204
        assert ask(server.url, "GET", f"/v1/programs/{fingerprint}").body.endswith(program)


def test_the_forms_of_curl_are_accepted(server: Server) -> None:
    """``--data-binary`` (a form's type), ``-T`` (no type) and ``Expect: 100-continue`` work."""
    for number, headers in enumerate(
        ({"Content-Type": "application/x-www-form-urlencoded"}, {"Content-Type": ""})
    ):
        assert _put(server, FRAME, headers, key=f"body/{number}").status == 201
    with Connection(server.url) as connection:
        length = {"Content-Length": str(len(FRAME)), "Expect": "100-continue"}
        connection.send(head_of("PUT", "/v1/bundles/body/expect", length))
        assert connection.socket.recv(100).startswith(b"HTTP/1.1 100 ")
        connection.send(FRAME)
        assert connection.answer().status == 201


def test_what_is_refused_is_not_read(server: Server) -> None:
    """With ``Expect: 100-continue`` a refusal comes in place of the invitation to send."""
    for target, status in (("/v1/bundles/body/leaves", 400), ("/v1/bundles/body/a?ttl=0", 422)):
        with Connection(server.url) as connection:
            length = {"Content-Length": str(len(FRAME)), "Expect": "100-continue"}
            connection.send(head_of("PUT", target, length))
            assert connection.answer().status == status


def test_line_ends_eaten_by_curl_are_explained(server: Server) -> None:
    """``curl -d @file`` strips bytes; the refusal says to use ``--data-binary``."""
    answer = _put(server, FRAME.replace(b"\n", b"").replace(b"\r", b"").replace(b"\0", b""))
    assert answer.code in {"invalid-frame", "invalid-manifest"}
    assert "--data-binary" in answer.json["detail"]


# Lengths


@pytest.mark.parametrize("body", [b"", FRAME[:9], FRAME[:4096], FRAME[:-1], FRAME + b"\0", FRAME * 2])
def test_a_body_of_another_length_is_refused(server: Server, body: bytes) -> None:
    """Content-Length tells the truth about the body, and the body is not one frame."""
    for headers in ({}, {"Content-Length": "", "Transfer-Encoding": "chunked"}):
        with Connection(server.url) as connection:
            given = headers or {"Content-Length": str(len(body))}
            given = {name: value for name, value in given.items() if value}
            connection.send(head_of("PUT", "/v1/bundles/body/a", given))
            connection.send(_chunked(body) if headers else body)
            answer = connection.answer()
        assert (answer.status, answer.code) == (400, "invalid-frame")
    assert _is_absent(server)


@pytest.mark.parametrize("length", ["-1", "abc", "1e9", "99999999999999999999999", "5, 6"])
def test_a_length_that_is_none_is_refused(server: Server, length: str) -> None:
    """A Content-Length that is no number is 400 and not a failure of the server."""
    with Connection(server.url) as connection:
        connection.send(head_of("PUT", "/v1/bundles/body/a", {"Content-Length": length}), b"x" * 20)
        assert connection.answer().status in {400, 413}


def test_a_chunked_upload_is_stored(server: Server) -> None:
    """Without Content-Length the frame says itself how long it is."""
    with Connection(server.url) as connection, open_store(server.url) as store:
        connection.send(head_of("PUT", "/v1/bundles/body/a", {"Transfer-Encoding": "chunked"}))
        connection.send(_chunked(FRAME, 77_777))
        assert connection.answer().status == 201
        assert_equal(store.get("body/a"), BUNDLE)


@pytest.mark.parametrize("chunk", [b"zz\r\n", b"-5\r\nabc", b"fffffffffffffffff\r\n", b"5\r\nabcdefgh\r\n"])
def test_a_malformed_chunk_is_refused(server: Server, chunk: bytes) -> None:
    """A chunk whose size is no size ends the upload with 400, and nothing is visible."""
    with Connection(server.url) as connection:
        connection.send(head_of("PUT", "/v1/bundles/body/a", {"Transfer-Encoding": "chunked"}))
        connection.send(_chunked(FRAME[: 1 << 20])[:-5], chunk)
        assert connection.socket.recv(100)[:12] in {b"HTTP/1.1 400", b""}
    assert _is_absent(server)


# Clients that go away or stand still


@pytest.mark.parametrize("chunked", [False, True])
def test_fifty_clients_that_go_away_leave_nothing(server: Server, chunked: bool) -> None:
    """After 50 uploads that broke off at different places nothing is visible, and all memory is back."""
    with open_store(server.url) as store:
        for number in range(50):
            headers = {"Transfer-Encoding": "chunked"} if chunked else {"Content-Length": str(len(FRAME))}
            body = _chunked(FRAME) if chunked else FRAME
            with Connection(server.url) as connection:
                connection.send(head_of("PUT", f"/v1/bundles/body/{number}", headers))
                connection.send(body[: len(body) * number // 50])
        until(lambda: store.usage().host_held_bytes == 0, what="the return of all memory")
        assert store.list(prefix="body/").entries == ()


def test_a_stalled_upload_is_ended(server: Server) -> None:
    """Whoever sends nothing for the time of the setting gets 408, after the head or in the middle of a leaf."""
    for sent in (0, 3, 4096, MIB):
        with Connection(server.url) as connection:
            started = time.monotonic()
            connection.send(head_of("PUT", "/v1/bundles/body/a", {"Content-Length": str(len(FRAME))}))
            connection.send(FRAME[:sent])
            answer = connection.answer()
            assert (answer.status, answer.code) == (408, "upload-stalled")
            assert 0.35 < time.monotonic() - started < 5
            assert connection.socket.recv(10) == b""
    assert _is_absent(server)


def test_a_slow_upload_is_not_a_stalled_one(server: Server) -> None:
    """An upload that takes longer than the setting is stored, as long as something comes."""
    with Connection(server.url) as connection:
        started = time.monotonic()
        connection.send(head_of("PUT", "/v1/bundles/body/a", {"Content-Length": str(len(FRAME))}))
        for number in range(6):
            until(lambda number=number: time.monotonic() - started > number * 0.2)  # type: ignore[misc]
            connection.send(FRAME[number * 1000 : (number + 1) * 1000])
        connection.send(FRAME[6000:])
        assert connection.answer().status == 201


# Limits


def test_a_body_above_the_limit_is_refused_at_its_head(server: Server) -> None:
    """A Content-Length above max_bundle_bytes is 413 before the body is read."""
    with Connection(server.url) as connection:
        connection.send(head_of("PUT", "/v1/bundles/body/a", {"Content-Length": str(11 * MIB)}))
        answer = connection.answer()
        assert (answer.status, answer.code) == (413, "too-large")


def test_a_chunked_body_above_the_limit_is_refused_while_it_comes(server: Server) -> None:
    """Without Content-Length the manifest gives it away, and 413 comes after the first pages."""
    frame = frame_of(noise(11 * MIB))
    with Connection(server.url) as connection:
        connection.send(head_of("PUT", "/v1/bundles/body/a", {"Transfer-Encoding": "chunked"}))
        connection.send(_chunked(frame)[:300_000])
        answer = connection.answer()
        assert (answer.status, answer.code) == (413, "too-large")


def test_a_program_above_the_limit_is_refused_while_it_comes(server: Server) -> None:
    """A chunked program is cut off at max_program_bytes."""
    with Connection(server.url) as connection:
        connection.send(head_of("PUT", f"/v1/programs/{'a' * 64}", {"Transfer-Encoding": "chunked"}))
        connection.send(_chunked(bytes(2 * MIB))[: MIB + 300_000])
        answer = connection.answer()
        assert (answer.status, answer.code) == (413, "too-large")
    assert ask(server.url, "GET", f"/v1/programs/{'a' * 64}").status == 404


def test_a_full_store_says_how_full(server: Server) -> None:
    """507 with needed and free bytes when bundles fill the memory, the old bundles whole; room comes with a delete."""
    bundles = [noise(9 * MIB, seed=number) for number in range(3)]
    with open_store(server.url) as store:
        for number in (0, 1):
            store.put(f"body/{number}", bundles[number])
        answer = _put(server, frame_of(bundles[2]), key="body/2")
        assert (answer.status, answer.code) == (507, "store-full")
        assert (answer.json["needed_bytes"], answer.json["free_bytes"]) == (9 * MIB, 6 * MIB)
        for number in (0, 1):
            assert_equal(store.get(f"body/{number}"), bundles[number])
        store.delete("body/0")
        until(lambda: store.usage().host_held_bytes < 10 * MIB)
        assert _put(server, frame_of(bundles[2]), key="body/2").status == 201


def test_a_busy_server_asks_to_come_again(server: Server) -> None:
    """429 with Retry-After while bodies in flight fill the memory; later the same request succeeds."""
    frame = frame_of(noise(9 * MIB))
    with Connection(server.url) as one, Connection(server.url) as two, open_store(server.url) as store:
        for number, connection in enumerate((one, two)):
            connection.send(head_of("PUT", f"/v1/bundles/body/{number}", {"Content-Length": str(len(frame))}))
            connection.send(frame[:4096])
        until(lambda: store.usage().host_held_bytes >= 18 * MIB, what="the uploads' start")
        answer = _put(server, frame, key="body/2")
        assert (answer.status, answer.code) == (429, "busy")
        assert int(answer.headers["retry-after"]) >= 1
    with open_store(server.url) as store:
        assert store.put("body/2", noise(9 * MIB, seed=1)).nbytes == 9 * MIB


def test_the_client_waits_for_a_busy_server(server: Server) -> None:
    """HttpStore comes again by itself, and gives up with Busy after its attempts."""
    frame = frame_of(noise(9 * MIB))
    with Connection(server.url) as one, Connection(server.url) as two, open_store(server.url) as store:
        for number, connection in enumerate((one, two)):
            connection.send(head_of("PUT", f"/v1/bundles/body/{number}", {"Content-Length": str(len(frame))}))
            connection.send(frame[:4096])
        until(lambda: store.usage().host_held_bytes >= 18 * MIB, what="the uploads' start")
        # Both uploads stall and are ended after 0.4 s, so the second attempt finds room.
        assert not store.put("body/2", noise(9 * MIB, seed=2)).existed
        with pytest.raises(NotFound):
            store.get("body/0")
    assert Busy.status == 429
