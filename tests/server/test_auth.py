"""Tokens: who may do what, told by hashes, and never told to anyone else."""

from __future__ import annotations

import hashlib
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from residual_server import Tokens, serve
from residual_store import open_store
from residual_store.errors import Forbidden, InvalidOption, ResidualStoreError, Unauthorized
from tests.server.raw import Connection, ask, frame_of, head_of
from tests.servers import Server, running_server
from tests.store.bundles import assert_equal, noise

TOKENS = {
    "reader": ("s3cret-reader-5f1c", ["exp1"], "read"),
    "trainer": ("s3cret-trainer-9a2b", ["exp1", "exp2"], "write"),
    "admin": ("s3cret-admin-77d0", ["*"], "admin"),
}
PROGRAM = "a" * 64


def _token_file(path: Path) -> Path:
    tables = [
        f'[[token]]\nname = "{name}"\nsha256 = "{hashlib.sha256(token.encode()).hexdigest()}"\n'
        f'runs = {runs}\naccess = "{access}"\n'
        for name, (token, runs, access) in TOKENS.items()
    ]
    path.write_text("\n".join(tables))
    return path


@dataclass(frozen=True)
class Guarded:
    """A server with tokens, and the file of its log."""

    server: Server
    log: Path


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Guarded]:
    """A server on disk that three tokens open, with a bundle in two runs."""
    folder = tmp_path_factory.mktemp("guarded")
    options = ["--tokens", str(_token_file(folder / "tokens.toml"))]
    with running_server(root=folder / "root", options=options, log=folder / "log") as server:
        with open_store(server.url, token=TOKENS["admin"][0]) as store:
            for run in ("exp1", "exp2", "exp3"):
                store.put(f"{run}/a", noise(100))
            store.put_program(PROGRAM, b"program")
        yield Guarded(server, folder / "log")


def _status(guarded: Guarded, name: str | None, method: str, target: str, body: bytes | None = None) -> int:
    headers = {} if name is None else {"Authorization": f"Bearer {TOKENS[name][0]}"}
    answer = ask(guarded.server.url, method, target, body, headers)
    if answer.status >= 400 and method != "HEAD":
        assert answer.code == {401: "unauthorized", 403: "forbidden", 404: "not-found"}[answer.status]
    return answer.status


_ROUTES = [
    ("GET", "/v1/bundles/exp1/a"),
    ("HEAD", "/v1/bundles/exp1/a"),
    ("GET", "/v1/bundles/exp1/a/manifest"),
    ("GET", "/v1/bundles/exp1/a/leaves/0"),
    ("PUT", "/v1/bundles/exp1/a"),
    ("DELETE", "/v1/bundles/exp1/a"),
    ("POST", "/v1/bundles/exp1/a/touch"),
    ("POST", "/v1/bundles/exp1/a/prefetch"),
    ("GET", "/v1/bundles?prefix=exp1/"),
    ("DELETE", "/v1/bundles?prefix=exp1/"),
    ("POST", "/v1/digests?run=exp1"),
    ("GET", f"/v1/programs/{PROGRAM}"),
    ("PUT", f"/v1/programs/{PROGRAM}"),
    ("GET", "/v1/capabilities"),
    ("GET", "/v1/usage"),
    ("GET", "/metrics"),
]


@pytest.mark.parametrize(("method", "target"), _ROUTES)
def test_nothing_is_open_without_a_token(guarded: Guarded, method: str, target: str) -> None:
    """Every route but those that say the server lives is 401 without a token, with a wrong one and with half of one."""
    half = TOKENS["admin"][0][:-1]
    for authorization in (
        None,
        "",
        "Bearer",
        "Bearer ",
        "Bearer wrong",
        f"Bearer {half}",
        f"Basic {TOKENS['admin'][0]}",
    ):
        headers = {} if authorization is None else {"Authorization": authorization}
        answer = ask(guarded.server.url, method, target, b"x" if method == "PUT" else None, headers)
        assert answer.status == 401, authorization
        assert answer.headers["www-authenticate"] == "Bearer"
        if method != "HEAD":
            assert answer.code == "unauthorized"


def test_health_is_open(guarded: Guarded) -> None:
    """A probe needs no token."""
    assert _status(guarded, None, "GET", "/healthz") == 200
    assert _status(guarded, None, "GET", "/readyz") == 200


def test_a_token_is_asked_for_before_the_body_is_read(guarded: Guarded) -> None:
    """401 comes in place of ``100 Continue``, and before a body that never comes."""
    with Connection(guarded.server.url) as connection:
        connection.send(
            head_of("PUT", "/v1/bundles/exp1/b", {"Content-Length": "1000000", "Expect": "100-continue"})
        )
        assert connection.answer().status == 401


@pytest.mark.parametrize(
    ("name", "method", "target", "status"),
    [
        ("reader", "GET", "/v1/bundles/exp1/a", 200),
        ("reader", "HEAD", "/v1/bundles/exp1/a", 200),
        ("reader", "GET", "/v1/bundles?prefix=exp1/", 200),
        ("reader", "GET", "/v1/bundles/exp2/a", 403),
        ("reader", "POST", "/v1/digests?run=exp1", 403),
        ("trainer", "POST", "/v1/digests?run=exp3", 403),
        ("reader", "HEAD", "/v1/bundles/exp2/a", 403),
        ("reader", "GET", "/v1/bundles/exp2/a/leaves/0", 403),
        ("reader", "GET", "/v1/bundles/exp2/a/manifest", 403),
        ("reader", "GET", "/v1/bundles", 403),
        ("reader", "GET", "/v1/bundles?prefix=exp", 403),
        ("reader", "GET", "/v1/bundles?prefix=exp1", 403),
        ("reader", "DELETE", "/v1/bundles/exp1/a", 403),
        ("reader", "DELETE", "/v1/bundles?prefix=exp1/", 403),
        ("reader", "POST", "/v1/bundles/exp1/a/touch?ttl=1", 403),
        ("reader", "GET", "/v1/bundles/exp10/a", 403),
        ("reader", "GET", "/v1/bundles/exp1/absent", 404),
        ("reader", "GET", "/v1/bundles/exp3/absent", 403),
        ("trainer", "POST", "/v1/bundles/exp2/a/touch?ttl=1000", 200),
        ("trainer", "DELETE", "/v1/bundles/exp3/a", 403),
        ("trainer", "DELETE", "/v1/bundles?prefix=exp", 403),
        ("admin", "GET", "/v1/bundles?prefix=exp", 200),
        ("admin", "GET", "/v1/bundles/exp3/a", 200),
    ],
)
def test_a_token_reaches_its_runs_and_its_access(
    guarded: Guarded, name: str, method: str, target: str, status: int
) -> None:
    """A run that is not the token's is 403 whether the bundle exists or not."""
    assert _status(guarded, name, method, target) == status


def test_writing_needs_a_token_that_writes(guarded: Guarded) -> None:
    """A reader cannot put, a trainer can put into its runs, and nothing is stored by a refused put."""
    frame = frame_of(noise(50, seed=8))
    assert _status(guarded, "reader", "PUT", "/v1/bundles/exp1/new", frame) == 403
    assert _status(guarded, "trainer", "PUT", "/v1/bundles/exp3/new", frame) == 403
    assert _status(guarded, "admin", "GET", "/v1/bundles/exp1/new") == 404
    assert _status(guarded, "trainer", "PUT", "/v1/bundles/exp1/new", frame) == 201
    assert _status(guarded, "trainer", "DELETE", "/v1/bundles/exp1/new") == 204


def test_programs_are_for_writers(guarded: Guarded) -> None:
    """A program is code that clients will run: a reader may fetch one and not store one."""
    assert _status(guarded, "reader", "GET", f"/v1/programs/{PROGRAM}") == 200
    assert _status(guarded, "reader", "PUT", f"/v1/programs/{'b' * 64}", b"evil") == 403
    assert _status(guarded, "trainer", "PUT", f"/v1/programs/{'b' * 64}", b"good") == 204


def test_usage_shows_only_the_runs_of_the_token(guarded: Guarded) -> None:
    """A reader of one run does not learn which others there are."""
    for name, runs in (
        ("reader", {"exp1"}),
        ("trainer", {"exp1", "exp2"}),
        ("admin", {"exp1", "exp2", "exp3"}),
    ):
        with open_store(guarded.server.url, token=TOKENS[name][0]) as store:
            assert {run.run for run in store.usage().runs} == runs


def test_the_client_raises_what_the_server_says(guarded: Guarded) -> None:
    """Unauthorized without a token and Forbidden with a small one, for every method, stat included."""
    with open_store(guarded.server.url) as store:
        for call in (store.get, store.stat, store.manifest, store.delete):
            with pytest.raises(Unauthorized):
                call("exp1/a")
    with open_store(guarded.server.url, token=TOKENS["reader"][0]) as store:
        assert_equal(store.get("exp1/a"), store.get("exp1/a"))
        for call in (store.get, store.stat, store.manifest, store.delete):
            with pytest.raises(Forbidden):
                call("exp3/a")


def test_a_token_is_never_told(guarded: Guarded) -> None:
    """No token stands in a log, an error, a repr or an answer, not even of one who sent a wrong one."""
    texts = []
    for token in [token for token, _, _ in TOKENS.values()] + ["s3cret-wrong-0000"]:
        with open_store(guarded.server.url, token=token) as store:
            texts += [repr(store), str(vars(store).get("url")), store.url]
            for call in (store.get, store.stat, store.delete):
                try:
                    call("exp3/absent")
                except ResidualStoreError as error:
                    texts += [str(error), repr(error), repr(error.fields)]
        headers = {"Authorization": f"Bearer {token}"}
        texts += [
            ask(guarded.server.url, method, target, None, headers).body.decode("latin-1")
            for method, target in [
                *_ROUTES,
                ("GET", "/v1/bundles/exp1"),
                ("BREW", "/"),
                ("GET", f"/v1/bundles/x?limit={token}"),
            ]
        ]
    texts.append(guarded.log.read_text())
    assert len(texts) > 30
    assert not [text for text in texts if "s3cret" in text]


def test_only_hashes_are_kept(tmp_path: Path) -> None:
    """What is in the server's memory of a token file does not hold a token, nor does its repr."""
    tokens = Tokens.read(_token_file(tmp_path / "tokens.toml"))
    assert tokens.grant(f"bearer {TOKENS['reader'][0]}").name == "reader"
    assert "s3cret" not in repr(tokens) + repr(vars(tokens))
    with pytest.raises(Unauthorized) as caught:
        tokens.grant("Bearer s3cret-wrong")
    assert "s3cret" not in str(caught.value) + repr(caught.value)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "token = 3",
        "[[token]]\nname = 'a'",
        "[[token]]\nname='a'\nsha256='00'\nruns=['*']\naccess='admin'",
        f"[[token]]\nname='a'\nsha256='{'z' * 64}'\nruns=['*']\naccess='admin'",
        f"[[token]]\nname='a'\nsha256='{'0' * 64}'\nruns='exp1'\naccess='admin'",
        f"[[token]]\nname='a'\nsha256='{'0' * 64}'\nruns=['*']\naccess='root'",
        "[[token]]\nname='a'\ntoken='s3cret'\nruns=['*']\naccess='read'",
        "[[token]",
    ],
)
def test_a_wrong_token_file_is_refused(tmp_path: Path, text: str) -> None:
    """A file that does not say who may do what keeps the server from starting, and its content is not repeated."""
    path = tmp_path / "tokens.toml"
    path.write_text(text)
    with pytest.raises(InvalidOption) as caught:
        Tokens.read(path)
    assert "s3cret" not in str(caught.value)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "example.org", "192.0.2.1"])
def test_a_bind_for_others_is_refused(host: str) -> None:
    """An address that others can reach, or a name that could be one, needs tokens."""
    with pytest.raises(InvalidOption, match="token file"):
        serve(host=host, port=0, ready=lambda url: pytest.fail(f"listens on {url}"))


def test_a_bind_for_others_needs_tokens(tmp_path: Path) -> None:
    """The command refuses 0.0.0.0 with one line and status 1, and serves it with a token file."""
    command = [sys.executable, "-m", "residual_store.cli", "serve", "--port", "0", "--host", "0.0.0.0"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (1, "", 1)
    assert done.stderr.startswith("invalid-option: ")
    options = ["--host", "0.0.0.0", "--tokens", str(_token_file(tmp_path / "tokens.toml"))]
    with running_server(options=options) as server:
        assert ask(f"http://127.0.0.1:{server.port}", "GET", "/v1/usage").status == 401
