"""The page pipe: what arrives is what lay there, on any way that the kernel has, and nothing is lost between two calls."""

from __future__ import annotations

import contextlib
import os
import resource
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, strategies as st

from residual_store.page_pipe import PagePipe

MIB = 1 << 20
_DESCRIPTORS = Path("/proc/self/fd")


@contextlib.contextmanager
def _pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        socket.create_connection(listener.getsockname()) as ours,
    ):
        theirs, _ = listener.accept()
        with theirs:
            yield ours, theirs


@pytest.fixture
def connected() -> Iterator[tuple[socket.socket, socket.socket]]:
    """Two sockets that are connected over the loopback interface."""
    with _pair() as sockets:
        yield sockets


def _noise(nbytes: int) -> memoryview:
    return memoryview(np.random.default_rng(nbytes).integers(0, 256, nbytes, np.uint8))


def _send_all(send: Callable[[memoryview], int], data: memoryview) -> None:
    while data:
        data = data[send(data) :]


def _exchanged(sockets: tuple[socket.socket, socket.socket], parts: list[memoryview]) -> bytes:
    ours, theirs = sockets
    come = bytearray()

    def read() -> None:
        while piece := theirs.recv(3 * MIB):
            come.extend(piece)

    reader = threading.Thread(target=read)
    reader.start()
    with PagePipe(ours) as pipe:
        for part in parts:
            _send_all(pipe.send, part)
    ours.shutdown(socket.SHUT_WR)
    reader.join()
    return bytes(come)


_LENGTHS = st.lists(
    st.one_of(st.integers(0, 5000), st.integers(MIB - 9, MIB + 9), st.integers(0, 5 * MIB)), max_size=4
)


@given(_LENGTHS, st.integers(0, 5000))
def test_the_bytes_arrive_in_order(lengths: list[int], start: int) -> None:
    """Parts of any lengths, from any place in a page."""
    parts = [_noise(start + nbytes)[start:] for nbytes in lengths]
    with _pair() as sockets:
        assert _exchanged(sockets, parts) == b"".join(parts)


def test_a_socket_that_has_no_room_says_so_and_goes_on_where_it_stopped(
    connected: tuple[socket.socket, socket.socket],
) -> None:
    """The pipe may refer to bytes then that the socket has not taken."""
    ours, theirs = connected
    data, come, sent, full = _noise(32 * MIB), bytearray(), 0, 0
    ours.setblocking(False)
    with PagePipe(ours) as pipe:
        while len(come) < len(data):
            try:
                while sent < len(data):
                    sent += pipe.send(data[sent:])
            except BlockingIOError:
                full += 1
            come += theirs.recv(MIB)
    assert come == data
    assert full


def test_arrays_are_sent_by_reference_and_bytes_are_not(
    connected: tuple[socket.socket, socket.socket],
) -> None:
    """What the peer reads of an array is what stands there then; a ``bytes`` may be freed once it is sent."""
    ours, theirs = connected
    array = np.full(2 * MIB, 3, np.uint8)
    with PagePipe(ours) as pipe:
        sent = pipe.send(memoryview(array))
        array[:] = 1
        assert theirs.recv(sent, socket.MSG_WAITALL) == b"\1" * sent
        sent = pipe.send(memoryview(bytes(array)))
        array[:] = 2
        later = [bytes(array) for _ in range(3)]
        assert theirs.recv(sent, socket.MSG_WAITALL) == b"\1" * sent
    assert later == [bytes(array)] * 3


def test_without_a_pipe_the_bytes_are_copied(connected: tuple[socket.socket, socket.socket]) -> None:
    """A process may have no descriptor left."""
    ours, theirs = connected
    ours.setblocking(False)
    data = _noise(MIB)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, hard))
    try:
        with PagePipe(ours) as pipe:
            sent = pipe.send(data)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert theirs.recv(sent, socket.MSG_WAITALL) == data[:sent]


class _Appending:
    """Something to write to that splice(2) refuses: a file that is appended to."""

    def __init__(self, file: int) -> None:
        self._file = file

    def fileno(self) -> int:
        return self._file

    def send(self, data: memoryview) -> int:
        return os.write(self._file, data)


def test_where_pages_cannot_be_moved_the_bytes_are_copied(tmp_path: Path) -> None:
    """Those that the pipe refers to already, too, and only once."""
    data = _noise(3 * MIB)
    path = tmp_path / "appended"
    with path.open("ab") as file, PagePipe(_Appending(file.fileno())) as pipe:  # type: ignore[arg-type]
        _send_all(pipe.send, data)
    assert path.read_bytes() == data


def test_no_descriptor_is_left(connected: tuple[socket.socket, socket.socket]) -> None:
    """A pipe has two."""
    before = len(list(_DESCRIPTORS.iterdir()))
    with PagePipe(connected[0]) as pipe:
        pipe.send(_noise(MIB))
        assert len(list(_DESCRIPTORS.iterdir())) == before + 2
    assert len(list(_DESCRIPTORS.iterdir())) == before
