"""Loopback: buffers fit the body, and only those of the loopback interface are touched."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest

from residual_store.loopback import fit_buffers

_SIDES = (socket.SO_SNDBUF, socket.SO_RCVBUF)


def _buffers(sock: socket.socket) -> list[int]:
    return [sock.getsockopt(socket.SOL_SOCKET, side) for side in _SIDES]


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


def _granted(nbytes: int) -> list[int]:
    """What the kernel gives who asks for so much, which its limits may make less."""
    with socket.socket() as sock:
        for side in _SIDES:
            sock.setsockopt(socket.SOL_SOCKET, side, nbytes)
        return _buffers(sock)


def test_a_body_of_a_few_mib_waits_as_a_whole_and_a_long_one_stays_in_the_cache(
    connected: socket.socket,
) -> None:
    """A connection that is kept gets other buffers for each body; a very short body is not worth it."""
    in_cache, whole = _granted(256 << 10), _granted(4 << 20)
    fit_buffers(connected, 100 << 20)
    assert _buffers(connected) == in_cache
    fit_buffers(connected, 1000)
    assert _buffers(connected) == in_cache
    fit_buffers(connected, 4 << 20)
    assert _buffers(connected) == whole
    fit_buffers(connected, 100 << 20)
    assert _buffers(connected) == in_cache


def test_other_sockets_keep_the_buffers_of_the_kernel() -> None:
    """A unix socket, and one that is connected to nothing any more."""
    ours, theirs = socket.socketpair()
    with ours, theirs, socket.socket() as unconnected:
        for sock in (ours, unconnected):
            before = _buffers(sock)
            fit_buffers(sock, 4 << 20)
            assert _buffers(sock) == before
