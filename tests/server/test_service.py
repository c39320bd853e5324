"""What every route shares: unknown query parameters are refused, and what has expired is swept."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from residual_store import open_store
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
        until(lambda: store.usage().expired == 1)
