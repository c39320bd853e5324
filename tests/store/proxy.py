"""A proxy between a client and a server that loses, cuts and counts: the faults of a network, on demand."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

__all__ = ["Proxy", "proxy", "scripted"]


@dataclass
class Proxy:
    """What the proxy saw, and what it does to the next connections."""

    url: str
    heads: list[bytes] = field(default_factory=list)
    lose_answers: int = 0
    cut_answers_after: list[int] = field(default_factory=list)


def _serve(listener: socket.socket, handle: Callable[[socket.socket], None]) -> None:
    with contextlib.suppress(OSError):
        while True:
            connection, _ = listener.accept()
            threading.Thread(target=handle, args=(connection,), daemon=True).start()


@contextlib.contextmanager
def _listening(handle: Callable[[socket.socket], None]) -> Iterator[str]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=_serve, args=(listener, handle), daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            with contextlib.suppress(OSError):
                listener.shutdown(socket.SHUT_RDWR)
            thread.join(5)


@contextlib.contextmanager
def proxy(port: int) -> Iterator[Proxy]:
    """A proxy in front of the server on ``port``."""

    def handle(client: socket.socket) -> None:
        with client, socket.create_connection(("127.0.0.1", port)) as server, contextlib.suppress(OSError):
            up = threading.Thread(target=_copy, args=(client, server, state.heads), daemon=True)
            up.start()
            try:
                _answer(client, server, state)
            finally:
                # A close alone would wait for the other thread, which reads from this socket.
                client.shutdown(socket.SHUT_RDWR)

    with _listening(handle) as url:
        state = Proxy(url)
        yield state


def _answer(client: socket.socket, server: socket.socket, state: Proxy) -> None:
    """Pass on what the server says, as far as it is wanted."""
    while data := server.recv(65536):
        if data.startswith(b"HTTP/1.1 100 "):
            client.sendall(data)
            continue
        if state.lose_answers > 0:
            state.lose_answers -= 1
            return
        if state.cut_answers_after:
            client.sendall(_exactly(server, data, state.cut_answers_after.pop(0)))
            return
        client.sendall(data)


def _exactly(server: socket.socket, data: bytes, count: int) -> bytes:
    while len(data) < count:
        data += server.recv(count - len(data))
    return data[:count]


def _copy(client: socket.socket, server: socket.socket, heads: list[bytes]) -> None:
    with contextlib.suppress(OSError):
        while data := client.recv(1 << 20):
            if data[:4] in {b"GET ", b"PUT ", b"HEAD", b"POST", b"DELE"}:
                heads.append(data.split(b"\r\n\r\n")[0])
            server.sendall(data)
        server.shutdown(socket.SHUT_WR)


@contextlib.contextmanager
def scripted(*answers: bytes) -> Iterator[Proxy]:
    """A peer that gives these answers, one for each connection, and notes the heads of the requests."""
    left = list(answers)

    def handle(client: socket.socket) -> None:
        with client, contextlib.suppress(OSError):
            data = b""
            while b"\r\n\r\n" not in data and (more := client.recv(65536)):
                data += more
            state.heads.append(data.split(b"\r\n\r\n")[0])
            client.sendall(left.pop(0) if left else b"")
            client.shutdown(socket.SHUT_WR)
            while client.recv(65536):
                pass

    with _listening(handle) as url:
        state = Proxy(url)
        yield state
