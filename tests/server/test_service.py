"""What every route shares: a query parameter that a route does not have is refused."""

from __future__ import annotations

import json
import urllib.error
import urllib.request

import pytest

from tests.servers import Server


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
