"""Snapshot: the bytes of residuals at one moment, which nothing that happens later can change."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
import numpy.typing as npt

from residual_client.staging import Staging
from residual_client.transfer import Residual, is_key
from residual_store.arena import NoRoom
from residual_store.bundle import Payload
from residual_store.errors import LeafUnavailable
from residual_store.frame import aligned_empty
from residual_store.layout import offsets_of
from residual_store.segments import SegmentPool

__all__ = ["Snapshot", "snapshot_nbytes", "take_snapshot"]

type Host = npt.NDArray[np.generic]


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """The values of residuals without the arrays that had them.

    ``copied`` has those that were copied at the call, by index; the others are on their way from an accelerator to
    pinned memory, and ``staged`` waits for each in turn.
    ``identities`` has equal numbers where two leaves are one array.
    """

    paths: Sequence[str]
    identities: Sequence[int]
    copied: Mapping[int, Host]
    staged: Iterator[Host]

    def hosts(self) -> list[Host]:
        """All values in order, once they are on the host; to be called once.

        Raises `LeafUnavailable`, which names the leaf, for one whose computation or copy failed.
        """
        return [
            self.copied[index] if index in self.copied else _next(self.staged, path)
            for index, path in enumerate(self.paths)
        ]


def snapshot_nbytes(residuals: Sequence[Residual]) -> int:
    """The host memory that a snapshot needs, in bytes; an array that is several leaves counts once."""
    return sum({id(residual.value): int(residual.value.nbytes) for residual in residuals}.values())


def take_snapshot(residuals: Sequence[Residual], staging: Staging, pool: SegmentPool) -> Snapshot:
    """Make sure of the bytes of residuals that have been checked, and start what an accelerator copies by itself.

    What goes through pinned memory is safe as soon as its copy is started.
    Everything else is copied here: a numpy buffer can be used again, and so can the one that an array on a CPU stands on,
    because `jax.device_put` takes aligned host memory in place and nothing tells such an array from another.

    Raises `LeafUnavailable`, which names the leaf, for one whose computation failed.
    """
    first = {id(residual.value): index for index, residual in reversed(list(enumerate(residuals)))}
    identities = [first[id(residual.value)] for residual in residuals]
    values = [jax.random.key_data(one.value) if is_key(one.value) else one.value for one in residuals]
    apart = [staging.is_apart(value) for value in values]
    staged = staging.under_way(list(itertools.compress(values, apart)))
    copied_at_call = [index for index, is_apart in enumerate(apart) if not is_apart]
    sources = {identities[index]: _on_host(values[index], residuals[index].path) for index in copied_at_call}
    copies = dict(zip(sources, _copies(list(sources.values()), pool), strict=True))
    return Snapshot(
        paths=[residual.path for residual in residuals],
        identities=identities,
        copied={index: copies[identities[index]] for index in copied_at_call},
        staged=staged,
    )


def _on_host(value: Any, path: str) -> Host:
    try:
        return np.asarray(value)
    except Exception as error:
        raise _lost(path, error) from error


def _next(staged: Iterator[Host], path: str) -> Host:
    try:
        return next(staged)
    except Exception as error:
        raise _lost(path, error) from error


def _lost(path: str, error: Exception) -> LeafUnavailable:
    return LeafUnavailable(f"{path} cannot be read: {type(error).__name__}: {error}", leaf=path)


def _copies(hosts: Sequence[Host], pool: SegmentPool) -> list[Host]:
    """Read-only copies in one segment, one behind the other."""
    offsets = list(offsets_of(host.nbytes for host in hosts))
    nbytes = max((offset + host.nbytes for offset, host in zip(offsets, hosts, strict=True)), default=0)
    memory = _allocated(nbytes, pool)
    for offset, host in zip(offsets, hosts, strict=True):
        _copy(host, memory[offset : offset + host.nbytes])
    memory.flags.writeable = False
    return [
        memory[offset : offset + host.nbytes].view(host.dtype).reshape(host.shape) if host.nbytes else host
        for offset, host in zip(offsets, hosts, strict=True)
    ]


def _allocated(nbytes: int, pool: SegmentPool) -> Payload:
    try:
        return pool.allocate(nbytes).memory
    except NoRoom:
        # What is in flight is bounded by the caller, and a single bundle may be larger than that.
        return aligned_empty(nbytes)


def _copy(host: Host, target: Payload) -> None:
    if host.flags.c_contiguous:
        np.copyto(target, host.reshape(-1).view(np.uint8) if host.nbytes else target)
        return
    # As numbers of the same size, because numpy copies its own types faster.
    words = host.view(f"u{host.itemsize}") if host.itemsize <= 8 else host
    np.copyto(target.view(words.dtype).reshape(words.shape), words)
