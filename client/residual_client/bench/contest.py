"""The contest: everything that is measured, opened for one run."""

from __future__ import annotations

import contextlib
import inspect
import os
import secrets
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from residual_client.bench.limits import File, Memcpy, raw_socket
from residual_client.bench.peers import open_peers
from residual_client.bench.through_client import ThroughClient
from residual_client.bench.transports import Durable, Transport
from residual_client.bench.way import Way
from residual_client.local_server import local_server
from residual_store.bundle import Bundle
from residual_store.errors import InvalidOption
from residual_store.http_store import HttpStore
from residual_store.store import Store, open_store

__all__ = ["Contest", "contest"]


@dataclass(frozen=True, kw_only=True, eq=False)
class Contest:
    """The ways by kind; ``client`` takes a workload that has a VJP object, and ``left_out`` says what is missing and why.

    Files lie in ``folder``.
    """

    folder: Path
    limits: Sequence[Way]
    transports: Sequence[Way]
    client: Sequence[Way]
    peers: Sequence[Way] = ()
    left_out: dict[str, str] = field(default_factory=dict)


@contextlib.contextmanager
def contest(*, nbytes: int, peers: bool, url: str | None) -> Iterator[Contest]:
    """All ways for workloads up to ``nbytes``; servers and folders are gone at the end.

    ``url`` is a server to measure instead of one of its own.
    Raises `InvalidOption` if it is none, and whatever a store raises.
    """
    if url is not None and url.partition("://")[0] not in ("http", "https", "unix"):
        raise InvalidOption(f"{url} is not the URL of a server; embedded stores are measured in any case")
    run = f"bench-{secrets.token_hex(4)}"
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="residual-store-bench-")))
        server = url or stack.enter_context(local_server())
        embedded = stack.enter_context(open_store("memory://"))
        on_disk = stack.enter_context(open_store(f"file://{folder / 'root'}"))
        served, left_out = _served(stack, server, run)
        others, absent = open_peers(stack, folder) if peers else ([], {})
        yield Contest(
            folder=folder,
            limits=(Memcpy(nbytes), stack.enter_context(raw_socket(nbytes)), File(folder, nbytes)),
            transports=(
                Transport("embedded", embedded, run=run),
                *(Transport(name, store, run=run) for name, store in served.items()),
                Durable("durable", on_disk, run=run, root=folder / "root"),
            ),
            client=[ThroughClient(name, store, run=run) for name, store in served.items()],
            peers=others,
            left_out=left_out | absent,
        )


def _served(stack: contextlib.ExitStack, url: str, run: str) -> tuple[dict[str, Store], dict[str, str]]:
    """The stores over segments and over HTTP, and why one of them is left out."""
    found: dict[str, Store] = {}
    left_out: dict[str, str] = {}
    for name in ("segment", "http"):
        store = stack.enter_context(_over(url, segments=name == "segment"))
        stack.callback(store.delete_prefix, f"{run}/")
        transport, note = _transport_of(store, run)
        if transport == name:
            found[name] = store
        else:
            left_out[name] = note or f"the server takes {transport}"
    return found, left_out


def _over(url: str, *, segments: bool) -> Store:
    options: dict[str, Any] = {}
    if "segments" in inspect.signature(HttpStore).parameters:
        options["segments"] = segments
    return open_store(url, token=os.environ.get("RESIDUAL_STORE_TOKEN"), **options)


def _transport_of(store: Store, run: str) -> tuple[str, str]:
    """What a put really took, as its receipt says, and why."""
    key = f"{run}/probe"
    receipt = store.put(key, Bundle.of_arrays({"probe": np.arange(1 << 20)}), durability="host")
    store.delete(key)
    return getattr(receipt, "transport", "http"), getattr(receipt, "transport_note", None) or ""
