"""Loopback: the congestion control of sockets of the loopback interface, and of no others, is set."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest

from residual_store.loopback import unpaced


@pytest.fixture(params=["127.0.0.1", "::1"])
def connected(request: pytest.FixtureRequest) -> Iterator[socket.socket]:
    """A socket that is connected over the loopback interface."""
    family = socket.AF_INET6 if ":" in request.param else socket.AF_INET
    try:
        listener = socket.create_server((request.param, 0), family=family)
    except OSError:
        pytest.skip(f"this machine has no {request.param}")
    with listener, socket.create_connection(listener.getsockname()[:2]) as sock:
        yield sock


def test_a_connection_within_the_host_is_not_paced(connected: socket.socket) -> None:
    """Whatever congestion control the kernel would choose."""
    assert unpaced(connected)
    assert connected.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16).rstrip(b"\0") == b"reno"


def test_other_sockets_stay_as_they_are() -> None:
    """A unix socket, one that is connected to nothing, and one that is closed."""
    ours, theirs = socket.socketpair()
    with ours, theirs, socket.socket() as unconnected:
        before = unconnected.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16)
        assert not unpaced(ours)
        assert not unpaced(unconnected)
        assert unconnected.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16) == before
    assert not unpaced(unconnected)
