"""Connecting: a client of the store at a URL."""

from __future__ import annotations

import os

from residual_client.client import Client
from residual_client.room import WhenFull
from residual_store.settings import Settings
from residual_store.store import open_store

__all__ = ["connect"]


def connect(
    url: str | None = None,
    *,
    token: str | None = None,
    settings: Settings | None = None,
    when_full: WhenFull = "wait",
) -> Client:
    """A client of the store at ``url``.

    ``http://``, ``https://`` and ``unix://`` reach a server; ``memory://``, ``file:///path`` and any other tensorstore
    URL open the engine in this process.
    The defaults are ``$RESIDUAL_STORE_URL``, else ``memory://``, and ``$RESIDUAL_STORE_TOKEN``.
    ``when_full`` says what `Client.offload` does when `max_inflight_bytes` are not stored yet: wait, or raise `Busy`.

    >>> connect("memory://").store.url
    'memory://'
    """
    if url is None:
        url = os.environ.get("RESIDUAL_STORE_URL") or "memory://"
    if token is None and url.partition("://")[0] in ("http", "https", "unix"):
        token = os.environ.get("RESIDUAL_STORE_TOKEN") or None
    return Client(open_store(url, token=token, settings=settings), when_full=when_full)
