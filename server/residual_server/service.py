"""The service: what every route needs, passed in and not looked up."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable, Collection
from dataclasses import dataclass, field
from typing import Any

import anyio.to_thread
from fastapi import Request

from residual_server.allocator import give_back
from residual_server.auth import ANYONE, Access, Grant, Tokens, check_access
from residual_store.engine.local import LocalStore
from residual_store.errors import InvalidOption, NotFound, ResidualStoreError, Stopping
from residual_store.key import check_key, check_prefix, run_of
from residual_store.shared_arena import SharedArena

__all__ = ["Service", "is_quick", "refuse_unknown", "refuse_unknown_parameters"]

log = logging.getLogger("residual_server")

_FEW_LEAVES = 1024
_FEW_BYTES = 8 << 20

_LOOKING_AT_ONCE = 50
"""How many may look again each time that one would: 200 looks in a second take a tenth of one core."""


def is_quick(store: LocalStore, *, leaves: int = 0, fresh_bytes: int = 0) -> bool:
    """Whether something with so many leaves, and memory that may be new, takes less time than to have a thread do it."""
    return leaves <= _FEW_LEAVES and fresh_bytes <= _FEW_BYTES and not store.has_durable_tier


async def refuse_unknown_parameters(request: Request) -> None:
    """Raise what `refuse_unknown` does for a query parameter that the route does not have."""
    refuse_unknown(request, [one.alias for one in request.scope["route"].dependant.query_params])


def refuse_unknown(request: Request, known: Collection[str]) -> None:
    """Raise `InvalidOption` for a parameter that is not known or stands twice: a misspelt one must not pass."""
    names = [name for name, _ in request.query_params.multi_items()]
    for name in names:
        if names.count(name) > 1:
            raise InvalidOption(f"the parameter {name[:40]!r} stands there twice", option=name[:40])
        if name not in known:
            raise InvalidOption(
                f"this route has no parameter {name[:40]!r}; it has {', '.join(sorted(known)) or 'none'}",
                option=name[:40],
            )


@dataclass
class Service:
    """A store, the tokens that guard it, the memory that it shares, and whether the server is stopping."""

    store: LocalStore
    tokens: Tokens | None = None
    arena: SharedArena | None = None
    stopping: asyncio.Event = field(default_factory=asyncio.Event)
    waiting: int = 0
    """How many requests wait for a bundle."""

    def grant(self, request: Request) -> Grant:
        """The grant of the caller; raises `Unauthorized`."""
        return ANYONE if self.tokens is None else self.tokens.grant(request.headers.get("authorization"))

    def check_key(self, request: Request, key: str, access: Access) -> str:
        """The key, if it is well-formed and the caller has this access to its run."""
        grant = self.grant(request)
        check_access(grant, access, run_of(check_key(key, self.store.settings)))
        return key

    def check_prefix(self, request: Request, prefix: str, access: Access) -> str:
        """The prefix, if it is well-formed and the caller has this access to all runs that it covers."""
        grant = self.grant(request)
        run = run_of(prefix) if "/" in check_prefix(prefix, self.store.settings) else None
        check_access(grant, access, run)
        return prefix

    @staticmethod
    async def call[T](function: Callable[[], T], *, at_once: bool = False) -> T:
        """The result of a call of the store, made in a thread, because it may block, unless it is to be made ``at_once``."""
        return function() if at_once else await anyio.to_thread.run_sync(function)

    async def when_there[T](self, request: Request, key: str, seconds: float, look: Callable[[], T]) -> T:
        """The result of ``look``, tried again whenever ``key`` arrives, for ``seconds`` at most; raises `NotFound`."""
        if seconds <= 0:
            return await self.call(look, at_once=is_quick(self.store))
        gone = asyncio.ensure_future(_disconnected(request))
        self.waiting += 1
        try:
            return await self._awaited(key, min(seconds, self.store.settings.max_wait_seconds), look, gone)
        finally:
            self.waiting -= 1
            gone.cancel()

    async def _awaited[T](
        self, key: str, seconds: float, look: Callable[[], T], gone: asyncio.Future[None]
    ) -> T:
        loop, quick = asyncio.get_running_loop(), is_quick(self.store)
        deadline = loop.time() + seconds
        while True:
            with self.store.arrivals.expected(key) as arrival:
                try:
                    return await self.call(look, at_once=quick)
                except NotFound:
                    left = deadline - loop.time()
                    if left <= 0 or gone.done():
                        raise
                await self._first(asyncio.wrap_future(arrival), gone, min(left, self._pause or left))

    @property
    def _pause(self) -> float | None:
        """After how many seconds each who waits looks again, so that all together look so often at most."""
        seconds = self.store.look_again_seconds
        return None if seconds is None else seconds * max(1.0, self.waiting / _LOOKING_AT_ONCE)

    async def _first(self, arrival: asyncio.Future[None], gone: asyncio.Future[None], seconds: float) -> None:
        stop: asyncio.Future[Any] = asyncio.ensure_future(self.stopping.wait())
        try:
            awaited = [arrival, gone, stop]
            await asyncio.wait(awaited, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        finally:
            stop.cancel()
            arrival.cancel()
        if self.stopping.is_set():
            raise Stopping("the server is stopping; ask again when it is back")

    async def sweep(self) -> None:
        """Remove bundles whose lease has ended and give freed memory back, again and again until cancelled."""
        while True:
            await asyncio.sleep(self.store.settings.sweep_seconds)
            try:
                await self.call(self.store.expire)
            except ResidualStoreError as error:
                log.warning("bundles whose lease has ended are removed later: %s", error, exc_info=error)
            await self.call(give_back)

    @contextlib.asynccontextmanager
    async def lifespan(self, _: object) -> AsyncIterator[None]:
        """Sweep for as long as the app runs."""
        sweeping = asyncio.create_task(self.sweep())
        try:
            yield
        finally:
            sweeping.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await sweeping


async def _disconnected(request: Request) -> None:
    """Return when the client of a request, whose body is read or empty, has gone away."""
    while (await request.receive())["type"] != "http.disconnect":
        # A server may answer at once, again and again, and others have a turn.
        await asyncio.sleep(0)
