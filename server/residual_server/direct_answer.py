"""The direct answer: a thread writes a large body from memory to the socket, as long as the peer takes it.

An event loop writes what the buffer of a socket has room for, and comes back when it is told that there is room again.
Within one host that is half as fast as a blocking call, in which the kernel goes on at once.
A peer that does not keep up gets the rest through the event loop, which serves any number of slow ones.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import time
from collections.abc import Iterator
from typing import Protocol

import anyio
import anyio.to_thread

from residual_store.patient_send import limit_sends

__all__ = ["EXTENSION", "Connection", "DirectAnswer", "writing_threads"]

EXTENSION = "residual_store.direct_answer"
"""The name under which `DirectAnswer` stands in the extensions of an ASGI scope."""

_PIECE = 4 << 20
_PATIENCE_SECONDS = 0.05


class Connection(Protocol):
    """The connection's own protocol, as far as it goes on while a thread writes."""

    def begin_writing(self) -> bool:
        """Read and write nothing until `end_writing`; false, and nothing is done, if that cannot be."""

    def end_writing(self, nbytes: int) -> None:
        """Go on, after so many bytes of the body have been written."""


def writing_threads() -> anyio.CapacityLimiter:
    """A limit of one thread for each core."""
    return anyio.CapacityLimiter(os.cpu_count() or 1)


class DirectAnswer:
    """The body of the answer to one request on a ``connection`` and its ``transport``.

    ``threads`` limits how many are written so at a time.
    """

    def __init__(
        self, transport: asyncio.Transport, connection: Connection, threads: anyio.CapacityLimiter
    ) -> None:
        self.nbytes = 0
        self._transport = transport
        self._connection = connection
        self._threads = threads

    async def write(self, data: memoryview) -> int:
        """Write from the start of ``data``; how many bytes the peer has taken before it was slow, or gone."""
        # The event loop writes the headers before it runs this again.
        await asyncio.sleep(0)
        if not self._threads.available_tokens or not self._connection.begin_writing():
            return 0
        taken = 0
        try:
            # Without a descriptor left, the event loop can still write to the one that it has.
            with contextlib.suppress(OSError), _blocking(self._transport) as sock:
                taken = await anyio.to_thread.run_sync(_write, sock, data, limiter=self._threads)
        finally:
            self._connection.end_writing(taken)
        self.nbytes += taken
        return taken


@contextlib.contextmanager
def _blocking(transport: asyncio.Transport) -> Iterator[socket.socket]:
    """The socket of a transport, whose calls wait; it stays open for a thread even if the transport is closed."""
    with socket.socket(fileno=os.dup(transport.get_extra_info("socket").fileno())) as sock:
        sock.setblocking(True)
        limit_sends(sock, _PATIENCE_SECONDS)
        try:
            yield sock
        finally:
            sock.setblocking(False)


def _write(sock: socket.socket, data: memoryview) -> int:
    taken = 0
    while taken < len(data):
        started = time.monotonic()
        try:
            taken += sock.send(data[taken : taken + _PIECE])
        except OSError:
            # It is slow, or gone, which the event loop will see.
            break
        if time.monotonic() - started > _PATIENCE_SECONDS:
            break
    return taken
