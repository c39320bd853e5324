"""Snapshot: the bytes of arrays at one moment, which nothing that happens later can change."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from residual_client.shards import Shards
from residual_client.staging import Staging
from residual_store.arena import NoRoom
from residual_store.blocks import Blocks, Start
from residual_store.bundle import Payload
from residual_store.errors import LeafUnavailable
from residual_store.frame import aligned_empty
from residual_store.layout import offsets_of
from residual_store.segments import SegmentPool

__all__ = ["Host", "Snapshot", "allocated", "on_host", "take_snapshot"]

type Host = npt.NDArray[np.generic]


@dataclass(frozen=True, kw_only=True)
class _Frame:
    """An array without its values: its shape, and where its blocks start."""

    path: str
    shape: tuple[int, ...]
    starts: Sequence[Start]


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """The values of arrays without the arrays that had them.

    ``copied`` has those that were copied at the call, by index; the blocks of the others are on their way from an
    accelerator to pinned memory, and ``staged`` waits for each in turn.
    """

    frames: Sequence[_Frame]
    copied: Mapping[int, Host]
    staged: Iterator[Host]

    def hosts(self) -> list[Host]:
        """All values in order, once they are on the host; to be called once.

        Raises `LeafUnavailable`, which names the leaf, for one whose computation or copy failed.
        """
        return [
            self.copied[index] if index in self.copied else self._staged(frame)
            for index, frame in enumerate(self.frames)
        ]

    def _staged(self, frame: _Frame) -> Host:
        held = _whole(frame.shape, {start: _next(self.staged, frame.path) for start in frame.starts})
        return held.gathered() if isinstance(held, Blocks) else held


def take_snapshot(arrays: Sequence[Shards], staging: Staging, pool: SegmentPool) -> Snapshot:
    """Make sure of the bytes of arrays that have been checked, and start what an accelerator copies by itself.

    What goes through pinned memory is safe as soon as its copy is started.
    Everything else is copied here: a numpy buffer can be used again, and so can the one that an array on a CPU stands on,
    because `jax.device_put` takes aligned host memory in place and nothing tells such an array from another.
    The blocks of an array over several devices are copied to their places in the whole.

    Raises `LeafUnavailable`, which names the leaf, for one whose computation failed.
    """
    apart = [all(map(staging.is_apart, array.blocks.values())) for array in arrays]
    staged = staging.under_way(
        [block for array in itertools.compress(arrays, apart) for block in array.blocks.values()]
    )
    copied_at_call = [index for index, is_apart in enumerate(apart) if not is_apart]
    copies = _copies([_on_host(arrays[index]) for index in copied_at_call], pool)
    return Snapshot(
        frames=[_Frame(path=one.path, shape=one.shape, starts=list(one.blocks)) for one in arrays],
        copied=dict(zip(copied_at_call, copies, strict=True)),
        staged=staged,
    )


def _whole(shape: tuple[int, ...], blocks: Mapping[Start, Host]) -> Host | Blocks:
    """One array of its blocks, which is the only block if there is one."""
    first = next(iter(blocks.values()))
    return first if len(blocks) == 1 else Blocks(dtype=first.dtype, shape=shape, blocks=blocks)


def _on_host(array: Shards) -> Host | Blocks:
    return _whole(array.shape, {start: on_host(array.path, block) for start, block in array.blocks.items()})


def on_host(path: str, block: Any) -> Host:
    """The values of a single-device array of the leaf at ``path``, where they lie; raises `LeafUnavailable`."""
    try:
        return np.asarray(block)
    except Exception as error:
        raise _lost(path, error) from error


def _next(staged: Iterator[Host], path: str) -> Host:
    try:
        return next(staged)
    except Exception as error:
        raise _lost(path, error) from error


def _lost(path: str, error: Exception) -> LeafUnavailable:
    return LeafUnavailable(f"{path} cannot be read: {type(error).__name__}: {error}", leaf=path)


def _copies(hosts: Sequence[Host | Blocks], pool: SegmentPool) -> list[Host]:
    """Read-only copies in one segment, one behind the other."""
    offsets = offsets_of([host.nbytes for host in hosts])
    nbytes = max((offset + host.nbytes for offset, host in zip(offsets, hosts, strict=True)), default=0)
    memory = allocated(nbytes, pool)
    for offset, host in zip(offsets, hosts, strict=True):
        _copy(host, memory[offset : offset + host.nbytes])
    memory.flags.writeable = False
    return [
        memory[offset : offset + host.nbytes].view(host.dtype).reshape(host.shape)
        if isinstance(host, Blocks) or host.nbytes
        else host
        for offset, host in zip(offsets, hosts, strict=True)
    ]


def allocated(nbytes: int, pool: SegmentPool) -> Payload:
    """Memory of the pool, or other memory where it has no room."""
    try:
        return pool.allocate(nbytes).memory
    except NoRoom:
        # What is in flight is bounded by the caller, and a single bundle may be larger than that.
        return aligned_empty(nbytes)


def _copy(host: Host | Blocks, target: Payload) -> None:
    if isinstance(host, Blocks):
        host.fill(target)
        return
    if host.flags.c_contiguous:
        np.copyto(target, host.reshape(-1).view(np.uint8) if host.nbytes else target)
        return
    # As numbers of the same size, because numpy copies its own types faster.
    words = host.view(f"u{host.itemsize}") if host.itemsize <= 8 else host
    np.copyto(target.view(words.dtype).reshape(words.shape), words)
