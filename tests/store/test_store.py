"""The contract of a store over memory, a directory, and servers over TCP and a unix socket; and `open_store`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from residual_store import Settings, Store, open_store
from residual_store.engine.local import LocalStore
from residual_store.errors import InvalidOption
from tests.servers import Server
from tests.store.contract_time import FullStoreContract


class Clock:
    """A clock that moves when it is told to."""

    def __init__(self) -> None:
        self.now = 1_000_000.0

    def __call__(self) -> float:
        return self.now

    def turn(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def clock() -> Clock:
    """The clock of the local stores."""
    return Clock()


class _Local(FullStoreContract):
    @pytest.fixture
    def pass_time(self, clock: Clock) -> Callable[[float], None]:
        return clock.turn


class _Remote(FullStoreContract):
    @pytest.fixture
    def pass_time(self) -> Callable[[float], None]:
        return lambda seconds: None


class TestMemory(_Local):
    """``memory://``"""

    @pytest.fixture
    def store(self, clock: Clock) -> Iterator[Store]:
        with LocalStore.in_memory(settings=Settings(), clock=clock) as store:
            yield store


class TestFile(_Local):
    """``file://``"""

    @pytest.fixture
    def store(self, clock: Clock, tmp_path: Path) -> Iterator[Store]:
        with LocalStore.at(tmp_path.as_uri(), settings=Settings(), clock=clock) as store:
            yield store


class TestKeyValueStore(_Local):
    """A key-value store of tensorstore that is no file system, as an object store is none."""

    @pytest.fixture
    def store(self, clock: Clock) -> Iterator[Store]:
        with LocalStore.at(
            '{"driver": "memory", "path": "some/where"}', settings=Settings(), clock=clock
        ) as store:
            yield store


class TestHttpMemory(_Remote):
    """``http://``, a server without a root"""

    @pytest.fixture
    def store(self, memory_server: Server) -> Iterator[Store]:
        with open_store(memory_server.url) as store:
            yield store


class TestHttpDisk(_Remote):
    """``http://``, a server with a root"""

    @pytest.fixture
    def store(self, disk_server: Server) -> Iterator[Store]:
        with open_store(disk_server.url) as store:
            yield store


class TestUnix(_Remote):
    """``unix://``, a server with a root"""

    @pytest.fixture
    def store(self, unix_server: Server) -> Iterator[Store]:
        with open_store(unix_server.url) as store:
            yield store


class TestSegments(_Remote):
    """``http://``, every leaf area through shared memory"""

    @pytest.fixture
    def store(self, mapped_server: Server) -> Iterator[Store]:
        with open_store(mapped_server.url, settings=Settings(mapped_bytes=0)) as store:
            yield store


class TestStock(_Remote):
    """``http://``, the app under a uvicorn of its own, which knows nothing of direct bodies"""

    @pytest.fixture
    def store(self, stock_server: Server) -> Iterator[Store]:
        with open_store(stock_server.url, segments=False) as store:
            yield store


@pytest.mark.parametrize(
    "url", ["", "nothing://here", "http://user:secret@host", "http://host?a=b", "http://host#a"]
)
def test_what_is_no_url_of_a_store_is_refused(url: str) -> None:
    """open_store says so instead of guessing, and does not repeat a password."""
    with pytest.raises(InvalidOption) as caught:
        open_store(url)
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize("url", ["http://host:port", "http://host:99999", "http://"])
def test_a_wrong_address_is_refused_when_it_is_opened(url: str) -> None:
    """A port that is no port and a host that is none are found at once, as an error of this project."""
    with pytest.raises(InvalidOption):
        open_store(url)


def test_a_token_is_for_a_server(tmp_path: Path) -> None:
    """A store in this process takes no token, and the error does not repeat it."""
    with pytest.raises(InvalidOption) as caught:
        open_store(tmp_path.as_uri(), token="s3cret")
    assert "s3cret" not in str(caught.value)
