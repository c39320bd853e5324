"""The direct body: the kernel writes a large request body straight into a segment.

uvicorn hands a body to the app as ``bytes`` objects, which costs two copies and fresh memory for each of them.
When the app has seen the head of a frame and has a segment for its leaves, the transport of the connection is given
another protocol, an `asyncio.BufferedProtocol` whose buffer is the rest of the segment, until the body is there.
An app that is served by another server does not find this in its scope and takes the body as ASGI gives it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Protocol

from starlette.requests import ClientDisconnect

__all__ = ["EXTENSION", "DirectBody", "Sink"]

EXTENSION = "residual_store.direct_body"
"""The name under which `DirectBody` stands in the extensions of an ASGI scope."""


class Sink(Protocol):
    """Where the bytes of a body belong."""

    def buffer(self) -> memoryview:
        """The memory for all bytes that are still to come."""

    def received(self, count: int) -> None:
        """Note that the first ``count`` bytes of `buffer` are filled."""


class DirectBody:
    """The body of one request; ``begin`` takes the transport from its protocol, ``end`` gives it back.

    ``begin`` gives the bytes that have come in already and were not taken yet.
    """

    def __init__(
        self,
        transport: asyncio.Transport,
        *,
        begin: Callable[[], bytes],
        end: Callable[[bool], None],
        lost: Callable[[Exception | None], None],
    ) -> None:
        self.nbytes = 0
        self._transport = transport
        self._begin = begin
        self._end = end
        self._lost = lost

    async def fill(self, sink: Sink, *, idle_seconds: float) -> None:
        """Receive until the buffer of ``sink`` is full.

        Raises TimeoutError if nothing comes for so long, `starlette.requests.ClientDisconnect`, and whatever ``sink`` raises;
        the connection then ends with the answer.
        """
        rest = memoryview(self._begin())
        whole = False
        try:
            sink.buffer()[: len(rest)] = rest
            sink.received(len(rest))
            if len(sink.buffer()):
                await self._receive(sink, idle_seconds)
            whole = True
        finally:
            self._end(whole)

    async def _receive(self, sink: Sink, idle_seconds: float) -> None:
        if self._transport.is_closing():
            raise ClientDisconnect
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        filling = _Filling(self, sink, done)
        self._transport.set_protocol(filling)
        self._transport.resume_reading()
        try:
            before = -1
            while not done.done():
                if before == self.nbytes:
                    raise TimeoutError
                before = self.nbytes
                await asyncio.wait([done], timeout=idle_seconds)
            await done
        finally:
            self.pause()
            filling.end()
            # Its exception knows this frame, which knows the segment.
            del done

    def pause(self) -> None:
        """Read no further."""
        if not self._transport.is_closing():
            self._transport.pause_reading()

    def lost(self, error: Exception | None) -> None:
        """Tell the connection's own protocol that the connection is gone."""
        self._lost(error)


class _Filling(asyncio.BufferedProtocol):
    """The protocol of a connection while a body comes in."""

    def __init__(self, body: DirectBody, sink: Sink, done: asyncio.Future[None]) -> None:
        self._body = body
        self._sink: Sink | None = sink
        self._done: asyncio.Future[None] | None = done

    def get_buffer(self, sizehint: int) -> Any:
        return self._sink.buffer() if self._sink is not None else bytearray()

    def buffer_updated(self, nbytes: int) -> None:
        if self._sink is None:
            return
        self._body.nbytes += nbytes
        try:
            self._sink.received(nbytes)
        except Exception as error:  # noqa: BLE001 - the app that waits for the body must learn of it
            self._finish(error)
            return
        if not len(self._sink.buffer()):
            self._finish(None)

    def eof_received(self) -> bool:
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        self._finish(ClientDisconnect())
        self._body.lost(exc)

    def end(self) -> None:
        """Let go of the segment: uvloop keeps a protocol until the next one with buffers comes."""
        self._sink = self._done = None

    def _finish(self, error: Exception | None) -> None:
        done = self._done
        self.end()
        if done is None or done.done():
            return
        # At once: libuv would ask for the next buffer before the app runs again.
        self._body.pause()
        if error is None:
            done.set_result(None)
        else:
            done.set_exception(error)
