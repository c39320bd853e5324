"""The store: one protocol over memory, disk, object stores and HTTP, and `open_store`, which picks by URL."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, Self

import numpy as np
import numpy.typing as npt

from residual_store.bundle import Bundle, Payload
from residual_store.errors import InvalidOption
from residual_store.manifest import Manifest
from residual_store.parts import Part
from residual_store.settings import Settings
from residual_store.shared_leaf import SharedLeaf

__all__ = [
    "Durability",
    "IfExists",
    "Page",
    "Receipt",
    "RunUsage",
    "Stat",
    "Store",
    "Tier",
    "Transport",
    "Usage",
    "open_store",
]

type Durability = Literal["host", "disk"]
type IfExists = Literal["error", "same", "replace"]
type Tier = Literal["host", "durable"]
type Transport = Literal["memory", "segment", "http"]


@dataclass(frozen=True, kw_only=True)
class Stat:
    """What a store knows of a bundle without reading its leaves.

    ``tier`` is where a get would find it: a durable bundle that was prefetched is in the host tier as well.
    ``nbytes`` is the length of the leaf area and ``array_nbytes`` that of the leaves as host arrays, both in bytes.
    ``arrived`` and ``expires_at`` are seconds since the epoch; ``expires_at`` is None without a lease.
    ``digest`` names these exact bytes; ``content`` names the values and the program, whenever they were stored.
    """

    key: str
    tier: Tier
    durability: Durability
    fingerprint: str | None
    leaves: int
    nbytes: int
    array_nbytes: int
    arrived: float
    expires_at: float | None
    digest: str
    content: str


@dataclass(frozen=True, kw_only=True)
class Page:
    """One page of a listing in key order; ``next`` is the ``after`` of the following page, or None at the end."""

    entries: tuple[Stat, ...]
    next: str | None


@dataclass(frozen=True, kw_only=True)
class Receipt:
    """What an offload really did.

    ``nbytes`` went over the wire or into memory; ``saved_bytes`` says how many did not, by encoding.
    ``digest`` names the stored bytes, as in `Stat`.
    ``existed`` is true if this very bundle was there already, as after a lost answer.
    ``has_program`` says whether the store holds the program that the bundle names.
    ``platforms`` says where the source-free backward runs, and ``no_program`` why there is none, if so.
    ``transport`` is how the bytes came to the store: "memory" in this process, "segment" through shared memory, or "http",
    and then ``transport_note`` says why no segment was used.
    ``seconds`` has the time of each phase.
    """

    key: str
    leaves: int
    array_nbytes: int
    nbytes: int
    tier: Tier
    durability: Durability
    digest: str = ""
    existed: bool = False
    has_program: bool = False
    saved_bytes: Mapping[str, int] = field(default_factory=dict)
    fingerprint: str | None = None
    platforms: tuple[str, ...] = ()
    no_program: str | None = None
    transport: Transport = "memory"
    transport_note: str | None = None
    seconds: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class RunUsage:
    """Bundles and bytes of one run in one tier."""

    run: str
    tier: Tier
    bundles: int
    nbytes: int


@dataclass(frozen=True, kw_only=True)
class Usage:
    """How much a store holds, in bundles and bytes.

    ``host_held_bytes`` counts all memory that bundles and bodies in flight hold, out of ``host_total_bytes``.
    ``unindexed`` counts the bundles on disk that ``runs`` may not tell about yet, because the index is being made anew.
    ``host_program_bytes`` are those of the programs in memory, at most a quarter of ``host_total_bytes``, beside these.
    ``host_idle_bytes`` waits to be used again; ``segments_fresh`` and ``segments_recycled`` count the segments handed out so
    far, by whether their memory was new.
    """

    runs: tuple[RunUsage, ...]
    host_held_bytes: int
    host_total_bytes: int
    expired: int
    spilled: int
    unindexed: int = 0
    host_program_bytes: int = 0
    host_idle_bytes: int = 0
    segments_fresh: int = 0
    segments_recycled: int = 0


class Store(Protocol):
    """Bundles and programs by name, the same over every URL.

    Every method raises errors of `residual_store.errors` only.
    A bundle is visible wholly or not at all.
    """

    @property
    def url(self) -> str:
        """Where the store is, without credentials."""

    @property
    def settings(self) -> Settings:
        """The limits that this store was opened with."""

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
        """Store a bundle; on return it is whole and verified in memory ("host") or committed and fsynced ("disk").

        ``durability`` None means the best that this store has; ``ttl`` is the lease in seconds, None for no end.
        ``if_exists``: "error" raises `AlreadyExists` unless the very same bytes are there (a repeated request),
        "same" also accepts equal values and program, "replace" replaces in one step.
        With ``part``, ``bundle`` is one of the parts that `residual_store.parts` makes; they wait out of sight, each for
        ``part_ttl_seconds``, and become the bundle ``key`` when the last one is there.
        ``moved`` is called now and then with how many bytes have gone to a server, from 0 again when they are sent again.
        """

    def lend(self, key: str, nbytes: int) -> Payload | None:
        """Memory of the store for the leaf area of a bundle that is about to be put under a key; None if none is at hand.

        The put of a bundle that was copied into it, with `Bundle.copied_into`, copies nothing more.
        It goes back when its last view dies, and that of the bundle.
        """

    def held(
        self, run: str, leaves: Sequence[SharedLeaf], *, durability: Durability | None = None
    ) -> tuple[bool, ...]:
        """Which of these leaves a bundle of the run can be put without, see `residual_store.shared_leaf.with_shared`.

        They stay for ``dedup_seconds`` at least; if one is gone by the time of the put, that raises `LeafNotHeld`, and the
        whole bundle is to be put.
        """

    def get(self, key: str, *, wait: float = 0.0, verify: bool = False) -> Bundle:
        """The whole bundle; waits up to ``wait`` seconds for it to arrive, then raises `NotFound`.

        Its digests are checked when it comes over a wire or from a disk, and with ``verify`` also when it is a view of host
        memory, where they were checked already; raises `DataLoss`, which names the leaf.
        """

    def get_leaf(self, key: str, index: int) -> npt.NDArray[np.generic]:
        """The values of one leaf as a host array, without reading the others."""

    def manifest(self, key: str) -> Manifest:
        """The manifest alone."""

    def stat(self, key: str) -> Stat:
        """Sizes, tier and lease of a bundle."""

    def list(self, *, prefix: str = "", after: str = "", limit: int = 100) -> Page:
        """One page of bundles in key order, stable while others are added."""

    def delete(self, key: str, *, digest: str | None = None) -> None:
        """Delete a bundle, with ``digest`` only the one that it names; raises `NotFound` if there is none."""

    def delete_prefix(self, prefix: str) -> int:
        """Delete all bundles whose key starts with ``prefix``, and return how many; "run/" drops a whole run."""

    def touch(self, key: str, *, ttl: float | None) -> Stat:
        """Start the lease anew: ``ttl`` seconds from now, or without end for None."""

    def prefetch(self, key: str) -> Stat:
        """Bring a durable bundle to the host tier as well, if there is room."""

    def usage(self) -> Usage:
        """How much is held, by run and tier."""

    def put_program(self, fingerprint: str, program: bytes) -> None:
        """Store an exported backward under its fingerprint; the first one stays."""

    def get_program(self, fingerprint: str) -> bytes:
        """The exported backward with this fingerprint, its digest checked."""

    def close(self) -> None:
        """Release what the store holds; bundles that are only in its memory are gone."""

    def __enter__(self) -> Self: ...

    def __exit__(self, kind: object, error: BaseException | None, traceback: object, /) -> None: ...


def open_store(
    url: str, *, token: str | None = None, settings: Settings | None = None, **options: Any
) -> Store:
    """The store at ``url``.

    ``memory://`` is this process's memory, ``file:///path`` a directory, ``http://host:port``, ``https://`` and
    ``unix:///socket`` a server; any other URL goes to tensorstore, such as ``s3://bucket/path`` and ``gs://bucket/path``,
    and so does the JSON spec of a key-value store, which can name an endpoint.
    Raises `InvalidOption` for a URL that none of them knows.

    >>> with open_store("memory://") as store:
    ...     store.put("run/a", Bundle.of_arrays({"h": np.ones(3)})).nbytes
    8
    """
    settings = Settings.from_environment() if settings is None else settings
    if not isinstance(settings, Settings):
        raise InvalidOption(
            f"settings is a {type(settings).__name__}; pass Settings(...), which has them all",
            option="settings",
        )
    scheme = url.partition("://")[0]
    if scheme in {"http", "https", "unix"}:
        from residual_store.http_store import HttpStore

        return HttpStore(url, token=token, settings=settings, **options)
    if token is not None:
        raise InvalidOption(f"{url} is opened in this process, which takes no token; leave it out")
    from residual_store.engine.local import LocalStore

    if scheme == "memory":
        return LocalStore.in_memory(settings=settings, **options)
    return LocalStore.at(url, settings=settings, **options)
