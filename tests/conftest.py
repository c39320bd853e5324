"""Fixtures that several test files share."""

from __future__ import annotations

import os

# Four CPU devices, before any test imports JAX.
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=4")
os.environ.setdefault("JAX_PLATFORMS", "cpu")

from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest

from tests.servers import Server, running_server, running_stock_server

hypothesis.settings.register_profile("repeatable", derandomize=True)


@pytest.fixture(scope="session")
def memory_server() -> Iterator[Server]:
    """A server in a process of its own that keeps bundles in memory, over TCP."""
    with running_server() as server:
        yield server


@pytest.fixture(scope="session")
def disk_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server in a process of its own with a root on disk, over TCP."""
    with running_server(root=tmp_path_factory.mktemp("root")) as server:
        yield server


@pytest.fixture(scope="session")
def unix_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server in a process of its own with a root on disk, over a unix socket."""
    folder: Path = tmp_path_factory.mktemp("unix")
    with running_server(root=folder / "root", uds=folder / "socket") as server:
        yield server


@pytest.fixture(scope="session")
def mapped_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server in a process of its own that lends shared memory for the smallest bundles too."""
    environment = {"RESIDUAL_STORE_POOLED_BYTES": "1"}
    with running_server(root=tmp_path_factory.mktemp("root"), environment=environment) as server:
        yield server


@pytest.fixture(scope="session")
def stock_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """The app in a process of its own, under uvicorn's own protocol class and asyncio's own loop."""
    with running_stock_server(root=tmp_path_factory.mktemp("root")) as server:
        yield server
