"""The store over HTTP: the only module that knows the HTTP library.

The library is `http.client` of Python itself: it sends memoryviews as they are, receives straight into the memory of
the leaves, and follows no redirect, so a token never travels to another origin (docs/decisions has the comparison).
"""

from __future__ import annotations

import contextlib
import functools
import http.client
import random
import select
import socket
import ssl
import time
import urllib.parse
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from residual_store import answers
from residual_store.bundle import Bundle, digest_of
from residual_store.closing import ClosedAtExit
from residual_store.endpoint import Endpoint
from residual_store.engine.terms import check_if_exists, check_ttl, check_wait
from residual_store.errors import Busy, InternalError, NotFound, ResidualStoreError, Stopping, Unreachable
from residual_store.frame import MEDIA_TYPE, frame_head, frame_nbytes, frame_parts
from residual_store.key import check_fingerprint, check_key, check_prefix
from residual_store.manifest import Manifest, decode
from residual_store.settings import Settings
from residual_store.store import Durability, IfExists, Page, Receipt, Stat, Usage

__all__ = ["HttpStore"]

_ASK_FIRST_BYTES = 1 << 20
_ASK_FIRST_SECONDS = 1.0


@dataclass(frozen=True)
class _Body:
    """A body that can be sent again: its length, a fresh run of its parts, and its xxh3-128 if it has no other."""

    nbytes: int
    parts: Callable[[], Iterable[memoryview]]
    digest: str | None = None


@dataclass(frozen=True)
class _Request:
    method: str
    target: str
    token: str | None = field(repr=False)
    body: _Body | None
    patience: float


class HttpStore(ClosedAtExit):
    """A server behind the `residual_store.store.Store` protocol, which documents the methods.

    Every request can be repeated: a put that the server has already stored is recognized by its digest.
    Safe to use from several threads; each request in flight has a connection of its own, and idle ones are kept.
    """

    def __init__(self, url: str, *, token: str | None = None, settings: Settings) -> None:
        self.url = url
        self.settings = settings
        self._token = token
        self._idle: deque[http.client.HTTPConnection] = deque()
        endpoint = Endpoint.of(url)
        self._base = endpoint.base
        self._connect = _connector(endpoint, settings.connect_seconds)

    def close(self) -> None:
        while self._idle:
            self._idle.pop().close()

    # The Store protocol

    def put(
        self,
        key: str,
        bundle: Bundle,
        *,
        durability: Durability | None = None,
        ttl: float | None = None,
        if_exists: IfExists = "error",
    ) -> Receipt:
        started = time.perf_counter()
        check_ttl(ttl, self.settings)
        check_if_exists(if_exists)
        bundle = bundle.sealed()
        head = frame_head(bundle.manifest)
        body = _Body(frame_nbytes(head, bundle.manifest), lambda: frame_parts(head, bundle))
        query = {"durability": durability, "ttl": ttl, "if_exists": if_exists}
        receipt = self._exchange("PUT", self._bundle(key), answers.read_receipt, query=query, body=body)
        return replace(receipt, seconds={**receipt.seconds, "request": time.perf_counter() - started})

    def get(self, key: str, *, wait: float = 0.0) -> Bundle:
        deadline = time.monotonic() + check_wait(wait)
        while True:
            patience = min(max(deadline - time.monotonic(), 0.0), self.settings.max_wait_seconds)
            read = functools.partial(answers.read_frame, settings=self.settings)
            try:
                return self._exchange(
                    "GET", self._bundle(key), read, query={"wait": patience}, patience=patience
                )
            except NotFound:
                if time.monotonic() >= deadline:
                    raise

    def get_leaf(self, key: str, index: int) -> npt.NDArray[np.generic]:
        return self._exchange("GET", f"{self._bundle(key)}/leaves/{index}", answers.read_leaf)

    def manifest(self, key: str) -> Manifest:
        read = lambda answer: decode(answer.read(), self.settings)  # noqa: E731
        return self._exchange("GET", f"{self._bundle(key)}/manifest", read)

    def stat(self, key: str) -> Stat:
        return self._exchange("HEAD", self._bundle(key), answers.read_stat)

    def list(self, *, prefix: str = "", after: str = "", limit: int = 100) -> Page:
        query = {
            "prefix": check_prefix(prefix, self.settings),
            "after": check_prefix(after, self.settings),
            "limit": limit,
        }
        return self._exchange("GET", "/v1/bundles", answers.read_page, query=query)

    def delete(self, key: str) -> None:
        self._exchange("DELETE", self._bundle(key), answers.read_nothing)

    def delete_prefix(self, prefix: str) -> int:
        query = {"prefix": check_prefix(prefix, self.settings)}
        return self._exchange("DELETE", "/v1/bundles", answers.read_deleted, query=query)

    def touch(self, key: str, *, ttl: float | None) -> Stat:
        return self._exchange("POST", f"{self._bundle(key)}/touch", answers.read_stat, query={"ttl": ttl})

    def prefetch(self, key: str) -> Stat:
        return self._exchange("POST", f"{self._bundle(key)}/prefetch", answers.read_stat)

    def usage(self) -> Usage:
        return self._exchange("GET", "/v1/usage", answers.read_usage)

    def put_program(self, fingerprint: str, program: bytes) -> None:
        body = _Body(len(program), lambda: [memoryview(program)], digest_of(program).hex())
        self._exchange(
            "PUT", f"/v1/programs/{check_fingerprint(fingerprint)}", answers.read_nothing, body=body
        )

    def get_program(self, fingerprint: str) -> bytes:
        return self._exchange("GET", f"/v1/programs/{check_fingerprint(fingerprint)}", answers.read_program)

    # One exchange

    def _bundle(self, key: str) -> str:
        return f"/v1/bundles/{check_key(key, self.settings)}"

    def _exchange[T](
        self,
        method: str,
        path: str,
        read: Callable[[Any], T],
        *,
        query: dict[str, Any] | None = None,
        body: _Body | None = None,
        patience: float = 0.0,
    ) -> T:
        """Send a request and ``read`` its answer, again while that can help; raises the error of the answer."""
        given = {name: value for name, value in (query or {}).items() if value is not None}
        target = self._base + path + ("?" + urllib.parse.urlencode(given) if given else "")
        request = _Request(method, target, self._token, body, patience)
        attempt = 0
        while True:
            attempt += 1
            try:
                return self._once(request, read)
            except NotFound:
                if method == "DELETE" and attempt > 1:
                    return read(None)  # the answer to the first attempt was lost
                raise
            except (Busy, Stopping, Unreachable) as error:
                if attempt >= self.settings.attempts:
                    raise
                pause = float(error.fields.get("retry_after") or 0.05 * 2**attempt)
                time.sleep(pause * random.uniform(0.8, 1.2))  # noqa: S311 - spreads clients, guards nothing

    def _once[T](self, request: _Request, read: Callable[[Any], T]) -> T:
        connection = self._take()
        try:
            with _told_apart(f"{request.method} {self.url}"):
                connection.timeout = self.settings.idle_answer_seconds + request.patience
                sent = _send(connection, request)
                answer = connection.getresponse()
                refusal = answers.refusal_of(self.url, answer) if answer.status >= 300 else None
                result = read(answer) if refusal is None else None
        except BaseException:
            connection.close()
            raise
        if sent:
            self._idle.append(connection)
        else:
            connection.close()
        if refusal is not None:
            raise refusal
        return cast("T", result)

    def _take(self) -> http.client.HTTPConnection:
        """An idle connection that the server has not closed meanwhile, or a new one."""
        while self._idle:
            connection = self._idle.pop()
            if connection.sock is not None and not select.select([connection.sock], [], [], 0)[0]:
                return connection
            connection.close()
        return self._connect()


@contextlib.contextmanager
def _told_apart(what: str) -> Iterator[None]:
    """Turn what the HTTP library and the readers of answers raise into errors of this project."""
    try:
        yield
    except ResidualStoreError:
        raise
    except (OSError, http.client.HTTPException) as error:
        raise Unreachable(f"{what}: {type(error).__name__}: {error}") from error
    except (ValueError, TypeError, LookupError, AttributeError) as error:
        raise InternalError(f"{what}: the answer is not understood; is it a store? {error}") from error


def _send(connection: http.client.HTTPConnection, request: _Request) -> bool:
    """Send a request; false if the server has answered before it wanted the body."""
    body = request.body
    connection.putrequest(request.method, request.target, skip_accept_encoding=True)
    connection.putheader("Accept", "application/msgpack, */*")
    if request.token is not None:
        connection.putheader("Authorization", f"Bearer {request.token}")
    if body is not None and body.digest is not None:
        connection.putheader("Residual-Digest", body.digest)
    asks = False
    if body is not None:
        connection.putheader("Content-Type", MEDIA_TYPE)
        connection.putheader("Content-Length", str(body.nbytes))
        asks = body.nbytes > _ASK_FIRST_BYTES and not isinstance(connection, http.client.HTTPSConnection)
    if asks:
        connection.putheader("Expect", "100-continue")
    connection.endheaders()
    connection.sock.settimeout(connection.timeout)
    if asks and not _may_send(connection.sock):
        return False
    for part in body.parts() if body is not None else ():
        connection.send(part)
    return True


def _may_send(sock: socket.socket) -> bool:
    """Whether the server wants the body: it says so, or says nothing for a while; false if it has answered already."""
    if not select.select([sock], [], [], _ASK_FIRST_SECONDS)[0]:
        return True
    if b" 100 " not in sock.recv(16, socket.MSG_PEEK):
        return False
    read = b""
    while not read.endswith(b"\r\n\r\n"):
        if not (more := sock.recv(1)):
            raise ConnectionResetError("the server closed the connection")
        read += more
    return True


class _UnixConnection(http.client.HTTPConnection):
    """A connection over a unix socket."""

    def __init__(self, path: str, *, timeout: float) -> None:
        super().__init__("localhost", timeout=timeout)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._path)


def _connector(endpoint: Endpoint, wait: float) -> Callable[[], http.client.HTTPConnection]:
    host, port = endpoint.host, endpoint.port
    if endpoint.scheme == "unix":
        return lambda: _UnixConnection(endpoint.socket, timeout=wait)
    if endpoint.scheme == "https":
        context = ssl.create_default_context()
        return lambda: http.client.HTTPSConnection(host, port, timeout=wait, context=context)
    return lambda: http.client.HTTPConnection(host, port, timeout=wait)
