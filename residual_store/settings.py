"""The one table of settings: every limit on a size, a count, a depth or a time, with unit, default and reason.

A setting is read from the environment as ``RESIDUAL_STORE_<NAME>``, for example ``RESIDUAL_STORE_HOST_BYTES``.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from residual_store.errors import InvalidOption

__all__ = ["Settings"]

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30


def _setting(default: float, unit: str, reason: str) -> Any:
    return field(default=default, metadata={"unit": unit, "reason": reason})


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Limits and times of the engine, the server and the client.

    Sizes are in bytes and times in seconds.

    >>> Settings(max_leaves=8).max_leaves
    8
    """

    host_bytes: int = _setting(
        0,
        "bytes",
        "memory for host-tier bundles and bodies in flight; 0 is half of the memory of the machine or container, so that it does not swap",
    )
    share_segments: int = _setting(
        1, "0 or 1", "whether a server lends shared memory to clients on its host, and a client uses it"
    )
    pooled_bytes: int = _setting(
        64 * KIB, "bytes", "smaller leaf areas come from the heap, where a page of their own would be a waste"
    )
    mapped_bytes: int = _setting(
        4 * MIB,
        "bytes",
        "smaller leaf areas travel in the body: one request is then as fast as two and a copy",
    )
    segment_idle_seconds: float = _setting(
        5.0,
        "seconds",
        "pooled memory that nobody used for so long goes back to the machine; raise it above the time of a training step",
    )
    max_bundle_bytes: int = _setting(
        256 * GIB, "bytes", "a frame above this is refused before its body is read"
    )
    max_manifest_bytes: int = _setting(
        64 * MIB, "bytes", "a manifest is decoded at once; 65,536 leaves with long paths need about 40 MiB"
    )
    max_program_bytes: int = _setting(
        1 * GIB, "bytes", "constants that the backward closes over are part of its program"
    )
    max_leaves: int = _setting(
        65_536,
        "leaves",
        "a VJP of several thousand parameters fits ten times over; a claimed billion is refused at once",
    )
    max_rank: int = _setting(32, "dimensions", "numpy allows 64 and XLA is used with far fewer")
    max_key_chars: int = _setting(
        512, "characters", "a key becomes a path below the root, and file systems stop at 4,096"
    )
    max_path_chars: int = _setting(
        4_096,
        "characters",
        "the pytree path of a leaf is for people; a longer one is shortened by the client",
    )
    max_tree_nodes: int = _setting(
        1_000_000,
        "nodes",
        "nodes of the recorded argument and output trees, and of any map or list in a manifest",
    )
    max_user_entries: int = _setting(64, "entries", "user metadata is a label, not a payload")
    max_user_chars: int = _setting(4_096, "characters", "one value of user metadata")
    packed_leaf_bytes: int = _setting(
        1 * MIB,
        "bytes",
        "smaller leaves share one array on disk: 1,000 of 4 KiB take 4 ms packed and 75 to 110 ms apart",
    )
    chunk_bytes: int = _setting(
        16 * MIB,
        "bytes",
        "chunk of a large leaf on disk; smaller ones cost more system calls, larger ones leave less to do side by side",
    )
    dedup_bytes: int = _setting(
        1 * MIB, "bytes", "smaller leaves are sent again: to ask for them takes as long as to send them"
    )
    dedup_seconds: float = _setting(
        30.0,
        "seconds",
        "a shared leaf stays for so long after its last bundle, or after a client was told that it is there",
    )
    staging_bytes: int = _setting(
        1 * GIB,
        "bytes",
        "a client copies so much at a time through pinned memory on the way from and to an accelerator, and holds twice as much",
    )
    max_inflight_bytes: int = _setting(
        1 * GIB,
        "bytes",
        "what a client has taken and not stored yet holds so much of its memory; beyond that offload waits or raises",
    )
    prefetch_bytes: int = _setting(
        256 * MIB,
        "bytes",
        "a client holds so much that it fetched before it was asked, and at most a quarter of `host_bytes`; 0 turns that off",
    )
    transfer_threads: int = _setting(
        4, "threads", "transfers of a client that run at once; more help only where the store answers slowly"
    )
    page_entries: int = _setting(1_000, "bundles", "the most entries of one page of a listing")
    max_wait_seconds: float = _setting(
        60.0,
        "seconds",
        "the longest long-poll for a bundle that is not there yet; below the idle limit of common proxies",
    )
    max_ttl_seconds: float = _setting(
        366 * 86_400.0, "seconds", "the longest lease; a bundle without a lease stays until it is deleted"
    )
    scratch_ttl_seconds: float = _setting(
        86_400.0,
        "seconds",
        "the lease of a bundle without a name, so that a dead client's bundles do not stay",
    )
    part_ttl_seconds: float = _setting(
        300.0,
        "seconds",
        "the lease of one process's part while it waits for those of the others; a slow step and a slow link fit",
    )
    sweep_seconds: float = _setting(
        5.0,
        "seconds",
        "how often the server removes bundles whose lease ended; they are invisible from the moment it ends",
    )
    orphan_seconds: float = _setting(
        86_400.0,
        "seconds",
        "on an object store, an unfinished upload older than this is removed at start; on a file system a dead writer is known at once",
    )
    header_seconds: float = _setting(
        10.0,
        "seconds",
        "a connection whose request line and headers take longer is closed, so that none is held for nothing",
    )
    max_header_bytes: int = _setting(64 * KIB, "bytes", "the longest key and token fit a hundred times")
    idle_body_seconds: float = _setting(
        30.0,
        "seconds",
        "an upload that brings no byte for so long is answered with 408, and a client that takes no byte of an answer is cut off, so that their memory is free",
    )
    graceful_seconds: float = _setting(
        10.0, "seconds", "on SIGTERM the server finishes what it can within this time and discards the rest"
    )
    retry_after_seconds: float = _setting(1.0, "seconds", "what a busy server asks its clients to wait")
    connect_seconds: float = _setting(5.0, "seconds", "the client gives up connecting after this")
    idle_answer_seconds: float = _setting(
        120.0,
        "seconds",
        "the client gives up when the server sends nothing for so long; a commit of many GiB to a slow disk fits",
    )
    stall_seconds: float = _setting(
        150.0,
        "seconds",
        "a client that waits for a transfer gives up when nothing moved for so long; above `idle_answer_seconds`, so that the transfer can say what is wrong",
    )
    exit_seconds: float = _setting(
        60.0,
        "seconds",
        "a program that ends waits so long for its named bundles, and then names those that are not stored",
    )
    attempts: int = _setting(
        4, "attempts", "how often the client sends a request that can be repeated, the first time included"
    )

    def __post_init__(self) -> None:
        for entry in fields(self):
            _check(entry.name, getattr(self, entry.name), type(entry.default))

    @classmethod
    def from_environment(
        cls, environment: Mapping[str, str] | None = None, **given: float | None
    ) -> Settings:
        """Settings from ``RESIDUAL_STORE_*`` variables; what is ``given`` and not None goes first.

        Raises `InvalidOption` for a value that is not a number of the setting's type or is negative, as the class does.

        >>> Settings.from_environment({"RESIDUAL_STORE_MAX_LEAVES": "16"}, attempts=2).max_leaves
        16
        """
        environment = os.environ if environment is None else environment
        values: dict[str, Any] = {}
        for entry in fields(cls):
            text = environment.get(f"RESIDUAL_STORE_{entry.name.upper()}")
            if text is not None:
                values[entry.name] = _number(entry.name, text, type(entry.default))
        return cls(**values | {name: value for name, value in given.items() if value is not None})

    @property
    def host_budget(self) -> int:
        """``host_bytes``, with 0 resolved to half of the memory of this machine or container."""
        return self.host_bytes or _memory_bytes() // 2


def _memory_bytes() -> int:
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        limit = Path("/sys/fs/cgroup/memory.max").read_text().strip()
    except OSError:
        return total
    return min(total, int(limit)) if limit.isdecimal() else total


def _fits(value: object, kind: type) -> bool:
    """Whether a value is a finite number of 0 or more, and a whole one for a setting that is."""
    is_number = isinstance(value, int) or (kind is float and isinstance(value, float))
    return is_number and 0 <= value < math.inf  # type: ignore[operator]


def _check(name: str, value: object, kind: type) -> None:
    if not _fits(value, kind):
        raise InvalidOption(
            f"{name} is {value!r}; it must be a finite {kind.__name__} of 0 or more", option=name
        )


def _number(name: str, text: str, kind: type) -> float:
    try:
        value: float = kind(text.replace("_", ""))
    except ValueError:
        value = math.nan
    if not _fits(value, kind):
        raise InvalidOption(
            f"RESIDUAL_STORE_{name.upper()} is {text!r}; it must be a finite {kind.__name__} of 0 or more",
            option=name,
        )
    return value
