"""The store over HTTP: the only module that knows the HTTP library.

The library is `http.client` of Python itself: it sends memoryviews as they are, receives straight into the memory of
the leaves, and follows no redirect, so a token never travels to another origin (docs/decisions has the comparison).
"""

from __future__ import annotations

import http.client
import os
import select
import socket
import ssl
import time
import urllib.parse
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, cast

import msgspec
import numpy as np
import numpy.typing as npt

from residual_store import answers
from residual_store.bearer import check_token
from residual_store.body import Body
from residual_store.bundle import Bundle, Payload, digest_of
from residual_store.bundle_transport import BundleTransport
from residual_store.closing import ClosedAtExit
from residual_store.continuation import ASK_FIRST_BYTES, may_send
from residual_store.endpoint import Endpoint, advice_on
from residual_store.engine.terms import check_if_exists, check_ttl, check_wait
from residual_store.errors import InternalError, NotFound, ResidualStoreError, Unreachable
from residual_store.key import check_fingerprint, check_key, check_prefix, check_run
from residual_store.loopback import unpaced
from residual_store.manifest import Manifest, decode
from residual_store.parts import Part
from residual_store.patient_send import waiting_in_kernel
from residual_store.retries import repeated
from residual_store.settings import Settings
from residual_store.shared_leaf import SharedLeaf
from residual_store.store import Durability, IfExists, Page, Receipt, Stat, Usage
from residual_store.translation import Translation

__all__ = ["HttpStore"]

_LARGE = 256 << 10
"""Bytes of a body from which it counts how it is sent."""


@dataclass(frozen=True)
class _Request:
    method: str
    target: str
    token: str | None = field(repr=False)
    body: Body | None
    patience: float
    headers: Mapping[str, str]


class HttpStore(ClosedAtExit):
    """A server behind the `residual_store.store.Store` protocol, which documents the methods.

    Every request can be repeated: a put that the server has already stored is recognized by its digest.
    Safe to use from several threads; each request in flight has a connection of its own, and idle ones are kept.
    Large bundles go through shared memory if the server is on this host, unless ``segments`` is false.
    """

    def __init__(
        self, url: str, *, token: str | None = None, settings: Settings, segments: bool = True
    ) -> None:
        self.url = url
        self.settings = settings
        self._token = check_token(token)
        self._idle: deque[http.client.HTTPConnection] = deque()
        self._process = os.getpid()
        endpoint = Endpoint.of(url)
        self._base = endpoint.base
        self._connect = _connector(endpoint, settings.connect_seconds)
        self._transport = BundleTransport(
            self._exchange, settings=settings, segments=segments and bool(settings.share_segments)
        )

    def close(self) -> None:
        while self._idle:
            self._idle.pop().close()
        self._transport.close()

    # The Store protocol

    def put(
        self,
        key: str,
        bundle: Bundle,
        *,
        durability: Durability | None = None,
        ttl: float | None = None,
        if_exists: IfExists = "error",
        part: Part | None = None,
        moved: Callable[[int], object] | None = None,
    ) -> Receipt:
        started = time.perf_counter()
        check_ttl(ttl, self.settings)
        check_if_exists(if_exists)
        query = {"durability": durability, "ttl": ttl, "if_exists": if_exists, "part": part}
        receipt = self._transport.put(self._bundle(key), key, bundle, query, moved or (lambda nbytes: None))
        return replace(receipt, seconds={**receipt.seconds, "request": time.perf_counter() - started})

    def lend(self, key: str, nbytes: int) -> Payload | None:
        return self._transport.lend(check_key(key, self.settings), nbytes)

    def held(
        self, run: str, leaves: Sequence[SharedLeaf], *, durability: Durability | None = None
    ) -> tuple[bool, ...]:
        query = {"run": check_run(run, self.settings), "durability": durability}
        content = msgspec.json.encode(leaves)
        body = Body(len(content), lambda: [memoryview(content)], media_type="application/json")
        return self._exchange("POST", "/v1/digests", answers.read_held, query=query, body=body)

    def get(self, key: str, *, wait: float = 0.0, verify: bool = False) -> Bundle:
        deadline = time.monotonic() + check_wait(wait)
        if (own := self._transport.own(check_key(key, self.settings), verify=verify)) is not None:
            return own
        while True:
            patience = min(max(deadline - time.monotonic(), 0.0), self.settings.max_wait_seconds)
            try:
                return self._transport.get(self._bundle(key), patience=patience, verify=verify)
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

    def delete(self, key: str, *, digest: str | None = None) -> None:
        self._transport.forget(key)
        path, query = self._bundle(key), {"digest": digest}
        self._exchange("DELETE", path, answers.read_nothing, query=query, gone=lambda: None)

    def delete_prefix(self, prefix: str) -> int:
        self._transport.forget_all(check_prefix(prefix, self.settings))
        return self._exchange("DELETE", "/v1/bundles", answers.read_deleted, query={"prefix": prefix})

    def touch(self, key: str, *, ttl: float | None) -> Stat:
        return self._exchange("POST", f"{self._bundle(key)}/touch", answers.read_stat, query={"ttl": ttl})

    def prefetch(self, key: str) -> Stat:
        return self._exchange("POST", f"{self._bundle(key)}/prefetch", answers.read_stat)

    def usage(self) -> Usage:
        return self._exchange("GET", "/v1/usage", answers.read_usage)

    def put_program(self, fingerprint: str, program: bytes) -> None:
        body = Body(len(program), lambda: [memoryview(program)], digest_of(program).hex())
        path = f"/v1/programs/{check_fingerprint(fingerprint)}"
        self._exchange("PUT", path, answers.read_nothing, body=body)

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
        query: Mapping[str, Any] | None = None,
        body: Body | None = None,
        patience: float = 0.0,
        headers: Mapping[str, str] | None = None,
        gone: Callable[[], T] | None = None,
    ) -> T:
        """Send a request and ``read`` its answer, ``repeated`` while that can help; raises the error of the answer."""
        given = {name: value for name, value in (query or {}).items() if value is not None}
        target = self._base + path + ("?" + urllib.parse.urlencode(given) if given else "")
        request = _Request(method, target, self._token, body, patience, headers or {})
        return repeated(lambda: self._once(request, read), self.settings, gone=gone)

    def _once[T](self, request: _Request, read: Callable[[Any], T]) -> T:
        connection = self._take()
        try:
            with Translation(partial(_translate, f"{request.method} {self.url}")):
                sent = _send(connection, request, self.settings.idle_answer_seconds + request.patience)
                answer = connection.getresponse()
                if answer.length is None and not answer.chunked:
                    # The library takes a head that was cut off for a whole one.
                    raise Unreachable("the answer broke off before it said how long it is")
                refusals = [answers.refusal_of(self.url, answer)] if answer.status >= 300 else []
                result = read(answer) if not refusals else None
        except BaseException:
            connection.close()
            raise
        if sent:
            self._idle.append(connection)
        else:
            connection.close()
        if refusals:
            raise refusals.pop()  # This frame, which is in its traceback, must not keep it and the memory of a put.
        return cast("T", result)

    def _take(self) -> http.client.HTTPConnection:
        """An idle connection that the server has not closed meanwhile, or a new one."""
        if self._process != os.getpid():
            # After a fork the idle connections are the parent's, which would get the answers to this process.
            self._idle, self._process = deque(), os.getpid()
        while self._idle:
            connection = self._idle.pop()
            if connection.sock is not None and not select.select([connection.sock], [], [], 0)[0]:
                return connection
            connection.close()
        return self._connect()


def _translate(what: str, error: Exception) -> None:
    """Turn what the HTTP library and the readers of answers raise into errors of this project."""
    if isinstance(error, ResidualStoreError):
        return
    if isinstance(error, OSError | http.client.HTTPException):
        raise Unreachable(f"{what}: {type(error).__name__}: {error}{advice_on(error)}") from error
    if isinstance(error, answers.NOT_UNDERSTOOD):
        raise InternalError(f"{what}: the answer is not understood; is it a store? {error}") from error


def _send(connection: http.client.HTTPConnection, request: _Request, wait: float) -> bool:
    """Send a request; false if the server has answered before it wanted the body."""
    body = request.body
    connection.putrequest(request.method, request.target, skip_accept_encoding=True)
    connection.putheader("Accept", "application/msgpack, */*")
    if request.token is not None:
        connection.putheader("Authorization", f"Bearer {request.token}")
    if body is not None and body.digest is not None:
        connection.putheader("Residual-Digest", body.digest)
    for name, value in request.headers.items():
        connection.putheader(name, value)
    asks = False
    if body is not None:
        connection.putheader("Content-Type", body.media_type)
        connection.putheader("Content-Length", str(body.nbytes))
        asks = body.nbytes > ASK_FIRST_BYTES and not isinstance(connection, http.client.HTTPSConnection)
    if asks:
        connection.putheader("Expect", "100-continue")
    connection.endheaders()
    parts = body.parts() if body is not None else []
    connection.sock.settimeout(wait)
    if asks and not may_send(connection.sock):
        return False
    if body is not None:
        is_near = body.nbytes > _LARGE and unpaced(connection.sock)
        with waiting_in_kernel(connection.sock, wait, by_reference=is_near) as send:
            for part in parts:
                send(part)
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
