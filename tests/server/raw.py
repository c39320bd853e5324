"""HTTP by hand, for what a well-behaved client never sends: bytes on a socket, and the answer parsed."""

from __future__ import annotations

import http.client
import json
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from residual_store import Bundle
from residual_store.frame import frame_head, frame_parts

__all__ = ["Answer", "Connection", "ask", "frame_of", "head_of"]


@dataclass(frozen=True)
class Answer:
    """What a server answered."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def code(self) -> str:
        """The code of a problem; fails the test if this is none."""
        assert self.headers["content-type"] == "application/problem+json", (self.status, self.body[:200])
        problem = self.json
        assert problem["status"] == self.status
        assert problem["detail"]
        assert problem["type"] == f"urn:residual-store:error:{problem['code']}"
        code: str = problem["code"]
        return code


class Connection:
    """One connection to a server, over TCP or a unix socket."""

    def __init__(self, url: str, *, seconds: float = 30) -> None:
        if url.startswith("unix://"):
            self.socket = socket.socket(socket.AF_UNIX)
            self.socket.settimeout(seconds)
            self.socket.connect(url.removeprefix("unix://"))
        else:
            host, _, port = url.removeprefix("http://").rpartition(":")
            self.socket = socket.create_connection((host, int(port)), timeout=seconds)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close()

    def send(self, *parts: bytes | memoryview) -> None:
        for part in parts:
            self.socket.sendall(part)

    def answer(self, method: str = "GET") -> Answer:
        """The next answer, read to its end."""
        response = http.client.HTTPResponse(self.socket, method=method)
        try:
            response.begin()
            headers = {name.lower(): value for name, value in response.getheaders()}
            return Answer(response.status, headers, response.read())
        finally:
            response.close()


def head_of(method: str, target: str, headers: Mapping[str, str] | None = None) -> bytes:
    """The head of a request; ``target`` goes out as it is."""
    lines = [f"{method} {target} HTTP/1.1", "Host: test"]
    lines += [f"{name}: {value}" for name, value in (headers or {}).items()]
    return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1")


def ask(
    url: str,
    method: str,
    target: str,
    body: bytes | None = None,
    headers: Mapping[str, str] | None = None,
    *,
    seconds: float = 30,
) -> Answer:
    """One request on a connection of its own, and its answer."""
    given = dict(headers or {})
    if body is not None:
        given.setdefault("Content-Type", "application/octet-stream")
        given.setdefault("Content-Length", str(len(body)))
    with Connection(url, seconds=seconds) as connection:
        connection.send(head_of(method, target, given), body or b"")
        return connection.answer(method)


def frame_of(bundle: Bundle) -> bytes:
    """The frame of a bundle as one string of bytes."""
    bundle = bundle.sealed()
    return b"".join(frame_parts(frame_head(bundle.manifest), bundle))
