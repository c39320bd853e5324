"""Errors over HTTP: each is a problem with a code of the table, and none repeats what it was sent."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from residual_store import open_store
from residual_store.errors import ERRORS
from residual_store.problem import error_from_problem, problem_of
from tests.server.raw import Connection, ask, head_of
from tests.servers import Server, running_server
from tests.store.bundles import noise

FINGERPRINT = "a" * 64


@pytest.fixture(scope="module")
def logged(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Server, Path]]:
    """A server on disk with one bundle, and the file of its log."""
    folder = tmp_path_factory.mktemp("problems")
    with running_server(root=folder / "outer" / "root", log=folder / "log") as server:
        with open_store(server.url) as store:
            store.put("run/a", noise(100, 50))
        yield server, folder / "log"


@pytest.mark.parametrize(
    ("method", "target", "status", "code"),
    [
        ("GET", "/", 404, "not-found"),
        ("GET", "/v2/bundles/run/a", 404, "not-found"),
        ("GET", "/v1/bundles/", 400, "invalid-key"),
        ("GET", "/v1/bundles/run", 400, "invalid-key"),
        ("GET", "/v1/bundles/run/a/", 400, "invalid-key"),
        ("GET", "/v1/bundles/run/absent", 404, "not-found"),
        ("GET", "/v1/bundles/run/a/leaves/2", 404, "not-found"),
        ("GET", "/v1/bundles/run/a/leaves/99999999999999999999", 404, "not-found"),
        ("GET", "/v1/bundles/run/a/leaves/x", 422, "invalid-option"),
        ("GET", "/v1/bundles/run/a/leaves/0?format=pickle", 422, "invalid-option"),
        ("GET", "/v1/bundles/run/a/leaves/0?slice=a", 422, "invalid-option"),
        ("GET", "/v1/bundles/run/a?wait=-1", 422, "invalid-option"),
        ("GET", "/v1/bundles/run/absent?wait=nan", 422, "invalid-option"),
        ("GET", "/v1/bundles/run/a?wait=soon", 422, "invalid-option"),
        ("GET", "/v1/bundles?limit=0", 422, "invalid-option"),
        ("GET", "/v1/bundles?limit=100000", 422, "invalid-option"),
        ("GET", "/v1/bundles?prefix=../", 400, "invalid-key"),
        ("DELETE", "/v1/bundles", 422, "invalid-option"),
        ("DELETE", "/v1/bundles?prefix=", 422, "invalid-option"),
        ("DELETE", "/v1/bundles?prefix=run/&prefix=run2/", 422, "invalid-option"),
        ("GET", "/v1/bundles/run/absent?wait=0&wait=1", 422, "invalid-option"),
        ("DELETE", "/v1/bundles/run/absent", 404, "not-found"),
        ("POST", "/v1/bundles/run/a/touch?ttl=0", 422, "invalid-option"),
        ("POST", "/v1/bundles/run/a/touch?ttl=1e99", 422, "invalid-option"),
        ("POST", "/v1/bundles/run/a/touch?ttl=inf", 422, "invalid-option"),
        ("POST", "/v1/bundles/run/absent/prefetch", 404, "not-found"),
        ("PATCH", "/v1/bundles/run/a", 405, "method-not-allowed"),
        ("POST", "/v1/bundles/run/a", 405, "method-not-allowed"),
        ("OPTIONS", "/v1/bundles/run/a", 405, "method-not-allowed"),
        ("POST", "/v1/bundles", 405, "method-not-allowed"),
        ("DELETE", "/healthz", 405, "method-not-allowed"),
        ("POST", "/metrics", 405, "method-not-allowed"),
        ("GET", f"/v1/programs/{FINGERPRINT}", 404, "not-found"),
        ("GET", "/v1/programs/XYZ", 422, "invalid-option"),
        ("DELETE", f"/v1/programs/{FINGERPRINT}", 405, "method-not-allowed"),
    ],
)
def test_every_refusal_is_a_problem(
    logged: tuple[Server, Path], method: str, target: str, status: int, code: str
) -> None:
    """The status and code are those of the table, and the body is application/problem+json."""
    answer = ask(logged[0].url, method, target)
    assert (answer.status, answer.code) == (status, code)
    assert ERRORS[code].status == status
    assert answer.json["title"] == ERRORS[code].__name__
    if status == 405:
        assert answer.headers["allow"]


@pytest.mark.parametrize(
    ("target", "methods"),
    [
        ("/v1/bundles/run/a", "DELETE, GET, HEAD, PUT"),
        ("/v1/usage", "GET, HEAD"),
        ("/v1/bundles", "DELETE, GET, HEAD"),
    ],
)
def test_a_method_that_is_refused_names_those_that_are_there(
    logged: tuple[Server, Path], target: str, methods: str
) -> None:
    """All of the path, in the header and in the text."""
    answer = ask(logged[0].url, "PATCH", target)
    assert answer.headers["allow"] == methods
    assert answer.json["detail"].endswith(f"it has {methods}")


_PAYLOAD = b"\x80\xffPAYLOAD" * 1000


@pytest.mark.parametrize(
    "kind", ["application/octet-stream", "application/json", "multipart/form-data; boundary=PAYLOAD"]
)
@pytest.mark.parametrize(
    ("method", "target"),
    [
        ("PUT", "/v1/bundles/run/b"),
        ("PUT", "/v1/bundles/run/b?durability=PAYLOAD"),
        ("PUT", "/v1/bundles/run/b?if_exists=PAYLOAD&ttl=PAYLOAD"),
        ("POST", "/v1/bundles/run/b/touch?ttl=PAYLOAD"),
        ("POST", "/v1/bundles/run/b/prefetch"),
        ("GET", "/v1/bundles?limit=PAYLOAD"),
        ("GET", "/v1/bundles/run/a/leaves/PAYLOAD"),
        ("GET", "/v1/bundles/run/a/leaves/0?slice=PAYLOAD&format=PAYLOAD"),
        ("GET", "/v1/programs/PAYLOAD"),
        ("POST", "/v1/bundles"),
        ("POST", "/nothing"),
    ],
)
def test_no_payload_is_echoed(logged: tuple[Server, Path], method: str, target: str, kind: str) -> None:
    """A binary body or a value that is refused stands neither in the answer nor in the log, and is no failure."""
    answer = ask(logged[0].url, method, target, _PAYLOAD, {"Content-Type": kind})
    assert 400 <= answer.status < 500
    assert b"PAYLOAD" not in answer.body
    assert answer.code in ERRORS
    log = logged[1].read_text(errors="replace")
    assert "PAYLOAD" not in log
    assert "Traceback" not in log


# Hostile keys, as they stand on the wire

_KEYS = [
    *("..", "../..", "../../etc/passwd", "run/..", "run/../..", "run/../../outside/x", "./run/a", "run/./a"),
    *("%2e%2e", "%2e%2e%2f%2e%2e%2fetc", "run/%2e%2e%2f%2e%2e%2foutside", "..%2f..%2fetc", "%252e%252e%252f"),
    *("run/%00", "%00/a", "run/a%00.json", "run//a", "//run/a", "run/a//", "run%2f%2fa", "%2frun/a"),
    *(
        "run/a%0d%0aX-Evil:1",
        "run/%ff%fe",
        "run/%c0%ae%c0%ae",
        "run/%ed%b2%80",
        "run/a%20b",
        "run/a%3Fb",
        "run/%5c..%5c",
    ),
    *("run/" + "a" * 4096, "r" * 4096, "run" + "/a" * 2048, "run/%41" * 600, "C:/windows", "run/a%"),
]


@pytest.mark.parametrize("key", _KEYS)
def test_a_hostile_key_reaches_nothing(logged: tuple[Server, Path], key: str) -> None:
    """Whatever stands in the path, raw or escaped, is refused by every method, and nothing appears outside the root."""
    server = logged[0]
    assert server.root is not None
    before = sorted(server.root.parent.rglob("*"))
    for method in ("GET", "HEAD", "PUT", "DELETE"):
        answer = ask(server.url, method, f"/v1/bundles/{key}", _PAYLOAD if method == "PUT" else None)
        assert answer.status in {400, 404}, (method, answer.status)
        assert "x-evil" not in answer.headers
        assert b"root:" not in answer.body
    for target in (f"/v1/bundles/{key}/manifest", f"/v1/bundles/{key}/leaves/0", f"/v1/bundles?prefix={key}"):
        assert ask(server.url, "GET", target).status in {200, 400, 404}
    assert sorted(server.root.parent.rglob("*")) == before


def test_an_escaped_slash_is_a_slash(logged: tuple[Server, Path]) -> None:
    """``%2F`` names the same bundle as a slash, so no check can be passed by spelling a key in another way."""
    assert ask(logged[0].url, "GET", "/v1/bundles/run%2Fa").status == 200
    assert ask(logged[0].url, "GET", "/v1/bundles/%72un/a").status == 200


def test_a_link_inside_the_root_leads_nowhere(tmp_path: Path) -> None:
    """A symbolic link below the root does not make another directory a part of it, for reading, writing or deleting."""
    outside, root = tmp_path / "outside", tmp_path / "root"
    with running_server(root=outside) as server, open_store(server.url) as store:
        store.put("run/a", noise(50))
    (root / "bundles").mkdir(parents=True)
    (root / "bundles" / "link").symlink_to(outside / "bundles" / "run")
    before = sorted(outside.rglob("*"))
    with running_server(root=root) as server:
        for method in ("GET", "PUT", "DELETE"):
            body = None if method != "PUT" else b"RSB1"
            assert 400 <= ask(server.url, method, "/v1/bundles/link/a", body).status < 500
        assert ask(server.url, "GET", "/v1/bundles").json["entries"] == []
        assert ask(server.url, "DELETE", "/v1/bundles?prefix=link/").status < 500
    assert sorted(path for path in outside.rglob("*") if "writers" not in path.parts) == [
        path for path in before if "writers" not in path.parts
    ]


# The table


@pytest.mark.parametrize("code", ERRORS)
def test_a_problem_is_its_error_again(code: str) -> None:
    """Class, text and fields survive the way through a problem, whatever the fields are."""
    error = ERRORS[code]("what, where and why", key="run/a", needed_bytes=5, flag=True, nothing=None)
    problem = problem_of(error)
    again = error_from_problem(problem, int(str(problem["status"])))
    assert (type(again), str(again)) == (type(error), str(error))
    assert {**again.fields, "http_status": 0} == {**error.fields, "http_status": 0}


def test_a_connection_survives_refusals(logged: tuple[Server, Path]) -> None:
    """Refusals without a body to read do not upset the requests behind them on the same connection."""
    with Connection(logged[0].url) as connection:
        for target, status in (
            ("/healthz", 200),
            ("/v1/bundles/..", 400),
            ("/nothing", 404),
            ("/readyz", 200),
        ):
            connection.send(head_of("GET", target))
            assert connection.answer().status == status
