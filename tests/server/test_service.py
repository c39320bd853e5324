"""What routes share: unknown query parameters are refused, what is awaited is found, and what has expired is swept."""

from __future__ import annotations

import contextlib
import json
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from residual_store import open_store
from tests.server.raw import Connection, ask, frame_of, head_of
from tests.servers import Server, running_server, until
from tests.store.bundles import noise


@pytest.mark.parametrize(
    ("method", "path", "name"),
    [
        ("PUT", "/v1/bundles/run/a?tll=5", "tll"),
        ("PUT", "/v1/bundles/run/a?if_exist=replace", "if_exist"),
        ("GET", "/v1/bundles?prefx=exp", "prefx"),
        ("DELETE", "/v1/bundles?prefix=run/&force=1", "force"),
        ("GET", "/healthz?verbose", "verbose"),
    ],
)
def test_an_unknown_parameter_is_refused(memory_server: Server, method: str, path: str, name: str) -> None:
    """A misspelt parameter is named in the answer, and nothing is done without it."""
    query = path if "=" in path else f"{path}=1"
    request = urllib.request.Request(memory_server.url + query, method=method)
    with pytest.raises(urllib.error.HTTPError) as refusal:
        urllib.request.urlopen(request)
    with refusal.value as answer:
        problem = json.loads(answer.read())
    assert (answer.status, problem["code"], problem["option"]) == (422, "invalid-option", name)


def test_the_sweeper_goes_on_after_a_failure(tmp_path: Path) -> None:
    """What it cannot remove now it removes later."""
    root, log = tmp_path / "root", tmp_path / "log"
    often = {"RESIDUAL_STORE_SWEEP_SECONDS": "0.05"}
    with running_server(root=root, environment=often, log=log) as server, open_store(server.url) as store:
        (root / "trash").rmdir()
        (root / "trash").touch()
        store.put("run/a", noise(8), ttl=0.01)
        until(lambda: log.read_text().count("whose lease has ended, is removed later") > 1)
        (root / "trash").unlink()
        (root / "trash").mkdir()
        until(lambda: store.usage().expired)
        assert (store.usage().expired, store.usage().runs) == (1, ())


def test_who_has_gone_away_is_not_waited_for(disk_server: Server) -> None:
    """A server with a root looks again and again for what is awaited, but not for nobody."""
    ended = 'residual_store_requests_total{method="GET",status="404"}'

    def count() -> float:
        text = ask(disk_server.url, "GET", "/metrics").body.decode()
        return sum(float(line.rpartition(" ")[2]) for line in text.splitlines() if line.startswith(ended))

    before = count()
    with contextlib.ExitStack() as waiting:
        for number in range(100):
            connection = waiting.enter_context(Connection(disk_server.url))
            connection.send(head_of("GET", f"/v1/bundles/gone/{number}?wait=50"))
    until(lambda: count() >= before + 100)
    assert count() == before + 100


@pytest.mark.parametrize("others", [0, 150])
def test_what_another_process_commits_is_found(tmp_path: Path, others: int) -> None:
    """Also where so many wait that each of them looks less often."""
    bundle = noise(8)
    with running_server(root=tmp_path) as server, contextlib.ExitStack() as waiting:
        for number in range(others):
            connection = waiting.enter_context(Connection(server.url))
            connection.send(head_of("GET", f"/v1/bundles/absent/{number}?wait=50"))
        connection = waiting.enter_context(Connection(server.url))
        connection.send(head_of("GET", "/v1/bundles/awaited/a?wait=50"))
        with open_store(tmp_path.as_uri()) as store:
            store.put("awaited/a", bundle)
        assert connection.answer().body == frame_of(bundle)
