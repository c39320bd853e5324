"""The app as a whole: its OpenAPI document, and HEAD wherever there is GET."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from residual_store import open_store
from residual_store.errors import ERRORS
from tests.server.raw import ask
from tests.servers import Server
from tests.store.bundles import noise

FINGERPRINT = "c" * 64


@pytest.fixture(scope="module")
def url(disk_server: Server) -> str:
    """A server with a bundle app/a and a program."""
    with open_store(disk_server.url) as store:
        store.put("app/a", noise(100, 50))
        store.put_program(FINGERPRINT, b"program")
    return disk_server.url


@pytest.fixture(scope="module")
def document(url: str) -> dict[str, Any]:
    """The OpenAPI document."""
    found: dict[str, Any] = ask(url, "GET", "/openapi.json").json
    return found


def _operations(document: dict[str, Any]) -> Iterator[tuple[str, str, dict[str, Any]]]:
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            yield path, method, operation


def _target(path: str) -> str:
    return path.replace("{key}", "app/a").replace("{index}", "0").replace("{fingerprint}", FINGERPRINT)


def test_every_operation_has_a_name_of_its_own(document: dict[str, Any]) -> None:
    """operationIds are unique and made by hand, so generated clients have stable method names."""
    names = [operation["operationId"] for _, _, operation in _operations(document)]
    assert len(set(names)) == len(names) >= 15
    assert all(name.isalnum() for name in names)
    assert {
        "putBundle",
        "getBundle",
        "deleteBundle",
        "listBundles",
        "deleteBundles",
        "getLeaf",
        "getManifest",
    } <= set(names)


def test_every_operation_is_described(document: dict[str, Any]) -> None:
    """Each has a summary, a description, a tag, and a schema for its errors with the codes of the table."""
    for path, method, operation in _operations(document):
        assert operation["summary"], (path, method)
        assert operation["description"], (path, method)
        assert operation["tags"], (path, method)
        schema = operation["responses"]["default"]["content"]["application/problem+json"]["schema"]
        assert set(schema["properties"]["code"]["enum"]) == set(ERRORS)


@pytest.mark.parametrize("path", ["/v1/bundles/{key}", "/v1/programs/{fingerprint}"])
def test_binary_bodies_are_declared(document: dict[str, Any], path: str) -> None:
    """What goes in and what comes out are binary, and said to be so."""
    operations = document["paths"][path]
    sent = operations["put"]["requestBody"]
    assert sent["required"]
    assert sent["content"]["application/octet-stream"]["schema"] == {"type": "string", "format": "binary"}
    got = operations["get"]["responses"]["200"]["content"]
    assert all(entry["schema"] == {"type": "string", "format": "binary"} for entry in got.values())
    assert "application/json" not in got


def test_leaves_are_declared(document: dict[str, Any]) -> None:
    """A leaf is binary in both of its forms, in whole and in part."""
    operation = document["paths"]["/v1/bundles/{key}/leaves/{index}"]["get"]
    for status in ("200", "206"):
        content = operation["responses"][status]["content"]
        assert set(content) == {"application/octet-stream", "application/x-npy"}
    assert {entry["name"] for entry in operation["parameters"]} == {"key", "index", "format", "slice"}


def test_every_reference_leads_somewhere(document: dict[str, Any]) -> None:
    """The document is whole: each $ref names a schema that is there, and the version is that of OpenAPI 3.1."""
    assert document["openapi"].startswith("3.1")
    schemas = document["components"]["schemas"]

    def check(node: object) -> int:
        if isinstance(node, dict):
            found = 0
            if "$ref" in node:
                assert node["$ref"].removeprefix("#/components/schemas/") in schemas
                found = 1
            return found + sum(map(check, node.values()))
        return sum(map(check, node)) if isinstance(node, list) else 0

    assert check(document) > 5


def test_the_documentation_is_there(url: str) -> None:
    """/docs is a page of the server itself."""
    answer = ask(url, "GET", "/docs")
    assert answer.status == 200
    assert answer.headers["content-type"].startswith("text/html")


def test_head_is_answered_wherever_get_is(url: str, document: dict[str, Any]) -> None:
    """HEAD gives the status, the length and the type of GET, and no body."""
    tried = 0
    for path, method, _ in _operations(document):
        if method == "get":
            got, head = (ask(url, method, _target(path)) for method in ("GET", "HEAD"))
            assert (head.status, head.body) == (got.status, b"") == (200, b""), path
            assert head.headers["content-type"] == got.headers["content-type"], path
            if path not in {"/metrics", "/v1/usage"}:
                assert head.headers["content-length"] == got.headers["content-length"], path
            tried += 1
    assert tried >= 9


def test_a_head_of_what_is_not_there(url: str) -> None:
    """HEAD has the status of GET where it is refused, too."""
    for target in ("/v1/bundles/app/absent", "/v1/bundles/..", "/v1/bundles/app/a/leaves/9", "/nothing"):
        got, head = (ask(url, method, target) for method in ("GET", "HEAD"))
        assert (head.status, head.body) == (got.status, b"")
        assert got.status in {400, 404}
