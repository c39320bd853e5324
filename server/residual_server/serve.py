"""Serving: sockets, uvicorn, and a stop that finishes or discards within its time."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import logging
import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import uvicorn

from residual_server.allocator import keep_little
from residual_server.app import create_app
from residual_server.auth import Tokens
from residual_server.protocol import limited_protocol
from residual_store.arena import arena_bytes
from residual_store.engine.local import LocalStore
from residual_store.errors import InvalidOption
from residual_store.settings import Settings
from residual_store.shared_arena import SharedArena

__all__ = ["serve"]

log = logging.getLogger("residual_store")

_BACKLOG = 2048


def serve(
    *,
    root: str | None = None,
    host: str = "127.0.0.1",
    port: int = 8731,
    uds: Path | None = None,
    tokens: Tokens | None = None,
    settings: Settings | None = None,
    ready: Callable[[str], object] = print,
) -> None:
    """Serve a store until SIGTERM or SIGINT.

    ``root`` is a tensorstore URL or a path for the durable tier; without it bundles live in memory only.
    ``port`` 0 takes a free one; ``uds`` serves on a unix socket instead.
    ``ready`` is called with the URL once the socket listens.
    Raises `InvalidOption` for a bind that others can reach without ``tokens``.
    """
    keep_little()
    settings = settings or Settings.from_environment()
    if uds is None and tokens is None and not _is_loopback(host):
        raise InvalidOption(f"{host} can be reached from elsewhere; give a token file, or bind to 127.0.0.1")
    arena = _shared_arena(settings)
    with (
        _open(root, settings, arena) as store,
        _listen(host, port, uds) as listener,
        _signals_end_quietly(),
    ):
        app = create_app(store, tokens=tokens, arena=arena)
        server = _Server(
            uvicorn.Config(
                app,
                loop="uvloop",
                http=limited_protocol(settings),
                access_log=False,
                server_header=False,
                timeout_graceful_shutdown=max(1, round(settings.graceful_seconds)),
                log_level="warning",
            ),
            stopping=app.state.service.stopping,
            ready=lambda: ready(_url(listener, uds)),
        )
        server.run(sockets=[listener])
    if uds is not None:
        uds.unlink(missing_ok=True)


def _shared_arena(settings: Settings) -> SharedArena | None:
    """Memory that clients on the same host can share; None if it is turned off or there is no memory file system."""
    if not settings.share_segments:
        return None
    try:
        return SharedArena(arena_bytes(settings.host_budget))
    except OSError as error:
        log.warning("no memory is shared with clients on this host: %s", error)
        return None


def _open(root: str | None, settings: Settings, arena: SharedArena | None) -> LocalStore:
    if root is None:
        return LocalStore.in_memory(settings=settings, arena=arena)
    url = root if "://" in root or root.startswith("{") else Path(root).absolute().as_uri()
    return LocalStore.at(url, settings=settings, arena=arena)


def _listen(host: str, port: int, uds: Path | None) -> socket.socket:
    try:
        if uds is not None:
            return _listen_unix(uds)
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        return socket.create_server((host, port), family=family, backlog=_BACKLOG)
    except (OSError, OverflowError) as error:
        raise InvalidOption(f"cannot listen on {uds or f'{host}:{port}'}: {error}") from error


def _listen_unix(path: Path) -> socket.socket:
    """A socket that only this user can reach; one that a dead server left is replaced, that of a living one is not."""
    if path.is_socket():
        with socket.socket(socket.AF_UNIX) as probe:
            if probe.connect_ex(str(path)) == 0:
                raise InvalidOption(f"another server listens on {path}")
        path.unlink()
    listener = socket.socket(socket.AF_UNIX)
    mask = os.umask(0o177)
    try:
        listener.bind(str(path))
        listener.listen(_BACKLOG)
    except BaseException:
        listener.close()
        raise
    finally:
        os.umask(mask)
    return listener


def _url(listener: socket.socket, uds: Path | None) -> str:
    if uds is not None:
        return f"unix://{uds.absolute()}"
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


@contextlib.contextmanager
def _signals_end_quietly() -> Iterator[None]:
    """Let uvicorn raise its captured signals once more at the end without killing the process before the store closes."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, lambda *_: None) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class _Server(uvicorn.Server):
    """uvicorn's server, which tells the app that it is ready, and that it is stopping before it waits for requests."""

    def __init__(
        self, config: uvicorn.Config, *, stopping: asyncio.Event, ready: Callable[[], object]
    ) -> None:
        super().__init__(config)
        self._stopping = stopping
        self._ready = ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            self._ready()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._stopping.set()
        await super().shutdown(sockets)
