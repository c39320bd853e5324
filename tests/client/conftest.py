"""Clients for the tests of the client."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import residual_client as rc
from tests.servers import Server


@pytest.fixture
def client() -> Iterator[rc.Client]:
    """A client of an empty store in this process."""
    with rc.connect("memory://") as client:
        yield client


@pytest.fixture(params=["memory", "file", "http"])
def any_client(request: pytest.FixtureRequest, tmp_path: Path, memory_server: Server) -> Iterator[rc.Client]:
    """A client of each kind of store, in which nothing is below ``test/``."""
    urls = {"memory": "memory://", "file": f"file://{tmp_path}", "http": memory_server.url}
    with rc.connect(urls[request.param]) as client:
        yield client
        client.store.delete_prefix("test/")
