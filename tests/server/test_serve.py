"""Serving: sockets that belong to one server, and one line for whatever keeps it from starting."""

from __future__ import annotations

import socket
import stat
from pathlib import Path

import pytest

from residual_store import Settings, open_store
from residual_store.errors import InvalidOption
from tests.server.raw import Connection, head_of
from tests.servers import Server, running_server, start_server
from tests.store.bundles import assert_equal, noise


def test_a_unix_socket_is_for_its_owner(unix_server: Server) -> None:
    """The socket has mode 0600 from the moment it is there."""
    path = Path(unix_server.url.removeprefix("unix://"))
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert path.is_socket()


def test_a_unix_socket_goes_with_its_server_and_replaces_a_stale_one(tmp_path: Path) -> None:
    """A socket that a killed server left is no obstacle, and a stopped server leaves none."""
    path = tmp_path / "socket"
    with socket.socket(socket.AF_UNIX) as stale:
        stale.bind(str(path))
    server = start_server(uds=path)
    with open_store(server.url) as store:
        store.put("uds/a", noise(10))
        assert_equal(store.get("uds/a"), store.get("uds/a"))
    assert server.stop() == 0
    assert not path.exists()


def test_a_unix_socket_in_use_is_not_stolen(tmp_path: Path) -> None:
    """A second server on the same socket is refused, and the first one goes on."""
    with running_server(uds=tmp_path / "socket") as server, open_store(server.url) as store:
        store.put("uds/a", noise(10))
        with pytest.raises(RuntimeError, match="did not start"), running_server(uds=tmp_path / "socket"):
            pytest.fail("a second server listens on the same socket")
        with open_store(server.url) as another:
            assert another.get("uds/a").manifest.nbytes == 10


def test_a_file_in_place_of_a_socket_is_kept(tmp_path: Path) -> None:
    """A path that is no socket is not deleted, and the error is one line of this project."""
    path, log = tmp_path / "socket", tmp_path / "log"
    path.write_text("precious")
    with pytest.raises(RuntimeError, match="did not start"):
        start_server(uds=path, log=log)
    assert path.read_text() == "precious"
    assert "Traceback" not in log.read_text()


def test_a_port_in_use_is_one_line(memory_server: Server, tmp_path: Path) -> None:
    """A server that cannot bind says so without a traceback."""
    with pytest.raises(RuntimeError, match="did not start"):
        start_server(options=["--port", str(memory_server.port)], log=tmp_path / "log")
    assert "Traceback" not in (tmp_path / "log").read_text()


def test_a_wrong_setting_is_one_line(tmp_path: Path) -> None:
    """A setting that is no number keeps the server from starting and is named."""
    environment = {"RESIDUAL_STORE_MAX_LEAVES": "many"}
    with pytest.raises(RuntimeError, match="did not start"):
        start_server(environment=environment, log=tmp_path / "log")
    text = (tmp_path / "log").read_text()
    assert "RESIDUAL_STORE_MAX_LEAVES" in text
    assert "Traceback" not in text
    with pytest.raises(InvalidOption):
        Settings.from_environment(environment)


def test_idle_connections_do_not_hold_up_a_stop() -> None:
    """A server with open connections and no request in flight ends at once, with status 0."""
    server = start_server()
    with Connection(server.url) as idle, Connection(server.url) as used:
        used.send(head_of("GET", "/healthz"))
        assert used.answer().status == 200
        assert server.stop(seconds=5) == 0
        assert idle.socket.recv(10) == b""
