"""The HTTP protocol of a connection: uvicorn's, with limits on what comes before a body, and with direct bodies and answers."""

from __future__ import annotations

import asyncio
import re
from typing import Any, cast

import anyio
import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from residual_server import direct_answer, direct_body
from residual_server.direct_answer import DirectAnswer, writing_threads
from residual_server.direct_body import DirectBody
from residual_store.loopback import unpaced
from residual_store.settings import Settings

__all__ = ["limited_protocol"]

_READ_AT_ONCE = 256 * 1024
_REQUEST = re.compile(rb"[A-Z]+ [^ \r\n]+ HTTP/1\.[01]\r\n")
_UPGRADE = re.compile(rb"\r\nupgrade:", re.IGNORECASE)
_TOO_LARGE = b"HTTP/1.1 431 Request Header Fields Too Large\r\nConnection: close\r\nContent-Length: 0\r\n\r\n"


def limited_protocol(settings: Settings) -> type[asyncio.Protocol]:
    """The protocol class for these settings; uvicorn makes one object of it for each connection."""
    return type("LimitedProtocol", (_LimitedProtocol,), {"settings": settings, "threads": writing_threads()})


class _LimitedProtocol(HttpToolsProtocol):
    """Closes a connection when a request's headers are too slow or too large, or when nobody takes its answer; uvicorn has a
    limit for none of them.

    It offers a `DirectBody` and a `DirectAnswer` in the scope of each request.
    """

    settings: Settings
    threads: anyio.CapacityLimiter

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._head_bytes: int | None = 0
        self._awaits_head = True
        self._late: asyncio.TimerHandle | None = None
        self._untaken: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        unpaced(transport.get_extra_info("socket"))
        self._start_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._end_head()
        self._taken()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._head_bytes is not None:
            self._head_bytes += len(data)
            # The first bytes of a body may come with the last ones of the headers.
            if self._head_bytes > self.settings.max_header_bytes + _READ_AT_ONCE:
                self.transport.write(_TOO_LARGE)
                self.transport.close()
                return
        is_head, self._awaits_head = self._awaits_head, False
        super().data_received(_without_upgrade(data) if is_head else data)

    def on_message_begin(self) -> None:
        super().on_message_begin()
        if self._late is None:
            self._start_head()

    def on_headers_complete(self) -> None:
        self._end_head()
        super().on_headers_complete()
        if self.cycle is not None and self.cycle.scope is self.scope:
            request = _Request(self, self.cycle)
            cast("dict[str, Any]", self.scope)["extensions"] = {
                direct_body.EXTENSION: DirectBody(self.transport, request),
                direct_answer.EXTENSION: DirectAnswer(self.transport, request, self.threads),
            }

    def on_message_complete(self) -> None:
        self._awaits_head = True
        super().on_message_complete()

    def _start_head(self) -> None:
        self._head_bytes = 0
        self._late = self.loop.call_later(self.settings.header_seconds, self.transport.close)

    def _end_head(self) -> None:
        self._head_bytes = None
        if self._late is not None:
            self._late.cancel()
            self._late = None

    def pause_writing(self) -> None:
        super().pause_writing()
        self._taken()
        self._watch(-1)

    def resume_writing(self) -> None:
        self._taken()
        super().resume_writing()

    def _watch(self, before: int) -> None:
        """Cut a client off that has taken nothing of its answer meanwhile: the answer holds the memory of a bundle."""
        left = self.transport.get_write_buffer_size()
        if left == before:
            self.transport.abort()
        else:
            self._untaken = self.loop.call_later(self.settings.idle_body_seconds, self._watch, left)

    def _taken(self) -> None:
        if self._untaken is not None:
            self._untaken.cancel()
            self._untaken = None

    def begin_direct(self, cycle: RequestResponseCycle) -> bytes | None:
        """What has come in of the body of a request; None if the parser has seen its end, and maybe the next request."""
        if not cycle.more_body:
            return None
        self.flow.pause_reading()
        come, cycle.body = cycle.body, bytearray()
        return bytes(come)

    def end_direct(self, cycle: RequestResponseCycle, whole: bool) -> None:
        """Go on with a parser that has not seen a body; after a body that broke off, nothing that follows can be understood."""
        if self.transport.is_closing():
            return
        self.transport.set_protocol(self)
        if whole:
            self.parser = httptools.HttpRequestParser(self)
            self._awaits_head = True
            cycle.more_body = False
        else:
            cycle.keep_alive = False
        cycle.message_event.set()
        self.flow.resume_reading()

    def begin_writing(self) -> bool:
        """Read nothing, if all that was to be written is written, and not for TLS."""
        transport = self.transport
        if (
            transport.is_closing()
            or transport.get_write_buffer_size()
            or transport.get_extra_info("ssl_object")
        ):
            return False
        self.flow.pause_reading()
        return True

    def end_writing(self, cycle: RequestResponseCycle, nbytes: int) -> None:
        """Go on reading, and count what was written of an answer."""
        cycle.expected_content_length -= nbytes
        if not self.transport.is_closing():
            self.flow.resume_reading()


def _without_upgrade(data: bytes) -> bytes:
    """The same head of a request, and what follows it, without an offer to go over to another protocol, such as h2c.

    A server may ignore that (RFC 9110, 7.8), and the parser would take no body after it.
    """
    end = data.find(b"\r\n\r\n") + 1
    # Of a head that comes in pieces nobody could tell what is a body already.
    if not end or not _REQUEST.match(data) or _UPGRADE.search(data, 0, end) is None:
        return data
    return _UPGRADE.sub(b"\r\nIgnored:", data[:end]) + data[end:]


class _Request:
    """One request on a connection: what a direct body, or a thread that writes the answer, gives its transport back to."""

    def __init__(self, protocol: _LimitedProtocol, cycle: RequestResponseCycle) -> None:
        self._protocol = protocol
        self._cycle = cycle

    def begin_direct(self) -> bytes | None:
        return self._protocol.begin_direct(self._cycle)

    def end_direct(self, whole: bool) -> None:
        self._protocol.end_direct(self._cycle, whole)

    def begin_writing(self) -> bool:
        return self._protocol.begin_writing()

    def end_writing(self, nbytes: int) -> None:
        self._protocol.end_writing(self._cycle, nbytes)

    def connection_lost(self, exc: Exception | None) -> None:
        self._protocol.connection_lost(exc)

    def pause_writing(self) -> None:
        self._protocol.pause_writing()

    def resume_writing(self) -> None:
        self._protocol.resume_writing()
