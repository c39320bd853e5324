"""The direct body: the kernel writes a large request body straight into a segment.

uvicorn hands a body to the app as ``bytes`` objects, which costs two copies and fresh memory for each of them.
When the app has seen the head of a frame and has a segment for its leaves, the transport of the connection is given
another protocol, an `asyncio.BufferedProtocol` whose buffer is the rest of the segment, until the body is there.
An app that is served by another server does not find this in its scope and takes the body as ASGI gives it.
"""

from __future__ import annotations

import asyncio
from typing import Any, Protocol

from starlette.requests import ClientDisconnect

__all__ = ["EXTENSION", "Connection", "DirectBody", "Sink"]

EXTENSION = "residual_store.direct_body"
"""The name under which `DirectBody` stands in the extensions of an ASGI scope."""

_READ_AT_ONCE = 2 << 20
"""Bytes that are in the cache still when they are hashed."""


class Sink(Protocol):
    """Where the bytes of a body belong."""

    def buffer(self) -> memoryview:
        """The memory for all bytes that are still to come."""

    def received(self, count: int) -> None:
        """Note that the first ``count`` bytes of `buffer` are filled."""


class Connection(Protocol):
    """The connection's own protocol, as far as it goes on while a body comes in."""

    def begin_direct(self) -> bytes | None:
        """Give the transport away, and what has come in of the body and was not taken yet; None if that is all of it."""

    def end_direct(self, whole: bool) -> None:
        """Take the transport back, after the ``whole`` body or a part of it."""

    def connection_lost(self, exc: Exception | None) -> None:
        """The connection is gone."""

    def pause_writing(self) -> None:
        """The peer is slow to take an answer, which may be that of an earlier request."""

    def resume_writing(self) -> None:
        """The peer has taken it."""


class DirectBody:
    """The body of one request on a ``connection`` and its ``transport``."""

    def __init__(self, transport: asyncio.Transport, connection: Connection) -> None:
        self.nbytes = 0
        self.connection = connection
        self._transport = transport

    async def fill(self, sink: Sink, *, idle_seconds: float) -> bool:
        """Receive until the buffer of ``sink`` is full; false, and nothing is done, if the body has come in already.

        What ``sink`` raises is raised when the rest of the body has come in and was thrown away: a client that is still
        sending when the connection is closed does not see the answer.
        Raises TimeoutError if nothing comes for so long, and `starlette.requests.ClientDisconnect`; the connection then
        ends with the answer.
        """
        come = self.connection.begin_direct()
        if come is None:
            return False
        filling = _Filling(self, sink)
        try:
            sink.buffer()[: len(come)] = come
            filling.buffer_updated(len(come))
            await self._receive(filling, idle_seconds)
        finally:
            self.connection.end_direct(filling.is_whole)
            filling.end()
        return True

    async def _receive(self, filling: _Filling, idle_seconds: float) -> None:
        if not filling.is_whole:
            if self._transport.is_closing():
                raise ClientDisconnect
            self._transport.set_protocol(filling)
            self._transport.resume_reading()
        try:
            before = -1
            while filling.done is not None and not filling.done.done():
                if before == self.nbytes:
                    raise TimeoutError
                before = self.nbytes
                await asyncio.wait([filling.done], timeout=idle_seconds)
            if filling.done is not None:
                filling.done.result()
        finally:
            self.pause()

    def pause(self) -> None:
        """Read no further."""
        if not self._transport.is_closing():
            self._transport.pause_reading()


class _Filling(asyncio.BufferedProtocol):
    """The protocol of a connection while a body comes in."""

    def __init__(self, body: DirectBody, sink: Sink) -> None:
        self.is_whole = False
        self.done: asyncio.Future[None] | None = asyncio.get_running_loop().create_future()
        self._body = body
        self._sink: Sink | None = sink
        self._view = sink.buffer()
        self._error: Exception | None = None

    def get_buffer(self, sizehint: int) -> Any:
        return self._view[:_READ_AT_ONCE]

    def buffer_updated(self, nbytes: int) -> None:
        self._body.nbytes += nbytes
        self._view = self._view[nbytes:]
        if self._sink is not None:
            try:
                self._sink.received(nbytes)
            except Exception as error:  # noqa: BLE001 - the app that waits for the body must learn of it
                self._sink, self._error = None, error
        if not len(self._view):
            self.is_whole = True
            self._finish(self._error)

    def eof_received(self) -> bool:
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        self._finish(ClientDisconnect())
        self._body.connection.connection_lost(exc)

    def pause_writing(self) -> None:
        self._body.connection.pause_writing()

    def resume_writing(self) -> None:
        self._body.connection.resume_writing()

    def end(self) -> None:
        """Let go of the segment: uvloop keeps a protocol until the next one with buffers comes, and an error its frames."""
        self.done = self._sink = self._error = None
        self._view = memoryview(b"")

    def _finish(self, error: Exception | None) -> None:
        done = self.done
        if done is None or done.done():
            return
        # At once: libuv would ask for the next buffer before the app runs again.
        self._body.pause()
        if error is None:
            done.set_result(None)
        else:
            done.set_exception(error)
