"""The contest: everything that is measured, opened for one run."""

from __future__ import annotations

import contextlib
import os
import secrets
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from residual_client.bench.limits import File, Memcpy, raw_socket
from residual_client.bench.machine import file_system
from residual_client.bench.peers import open_peers
from residual_client.bench.through_client import ThroughClient
from residual_client.bench.transports import Durable, Served, Transport
from residual_client.bench.way import Exchange, Way
from residual_client.local_server import local_server
from residual_store.errors import InvalidOption, StoreUnavailable
from residual_store.store import Store, open_store

__all__ = ["Contest", "contest"]

_IN_MEMORY = ("tmpfs", "ramfs")


@dataclass(frozen=True, kw_only=True, eq=False)
class Contest:
    """The ways by kind; ``client`` takes a workload that has a VJP object, and ``left_out`` says what is missing and why.

    Files lie in ``folder``.
    """

    folder: Path
    limits: Sequence[Way]
    transports: Sequence[Exchange]
    client: Sequence[Exchange]
    peers: Sequence[Exchange]
    left_out: Mapping[str, str]


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
        served = _served(stack, url or stack.enter_context(local_server()), run)
        others, left_out = open_peers(stack, folder) if peers else ([], {})
        kind = file_system(folder)
        if not (has_disk := kind not in _IN_MEMORY):
            left_out["durable"] = f"the temporary folder is in memory ({kind}); set TMPDIR to one on a disk"
        yield Contest(
            folder=folder,
            limits=[
                Memcpy(nbytes),
                stack.enter_context(raw_socket(nbytes)),
                *([File(folder, nbytes)] if has_disk else []),
            ],
            transports=[
                Transport("embedded", stack.enter_context(open_store("memory://")), run=run),
                *(Served(name, store, run=run) for name, store in served.items()),
                *([_durable(stack, folder / "root", run)] if has_disk else []),
            ],
            client=[ThroughClient(name, store, run=run) for name, store in served.items()],
            peers=others,
            left_out=left_out,
        )


def _served(stack: contextlib.ExitStack, url: str, run: str) -> dict[str, Store]:
    """The server's store over segments and over HTTP."""
    stores = {"segment": _over(url, segments=True), "http": _over(url, segments=False)}
    for store in stores.values():
        stack.enter_context(store)
        stack.callback(_clean, store, run)
    return stores


def _clean(store: Store, run: str) -> None:
    # If the server is gone, what it ended with is the error that should be seen.
    with contextlib.suppress(StoreUnavailable):
        store.delete_prefix(f"{run}/")


def _over(url: str, *, segments: bool) -> Store:
    return open_store(url, token=os.environ.get("RESIDUAL_STORE_TOKEN"), segments=segments)


def _durable(stack: contextlib.ExitStack, root: Path, run: str) -> Durable:
    return Durable("durable", stack.enter_context(open_store(f"file://{root}")), run=run, root=root)
