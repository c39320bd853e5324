"""Staging: pinned host memory as the way between an accelerator and numpy, a window of bytes at a time.

A GPU or TPU reaches pinned memory by itself, at the speed of its bus.
Other host memory is copied piece by piece through a small buffer of the runtime: 2.7 against 25 GB/s in jax-ml/jax#21438,
and jax-ml/jax#22114 has the reason.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
from jax.sharding import NamedSharding, Sharding, SingleDeviceSharding

from residual_client.jax_compat import relabelled

__all__ = ["Staging"]

type Host = npt.NDArray[np.generic]

_PINNED = "pinned_host"
# A device packs several elements of these into one byte, and numpy has one byte for each.
_PACKED = frozenset(
    {"int1", "int2", "int4", "uint1", "uint2", "uint4", "float4_e2m1fn", "float6_e2m3fn", "float6_e3m2fn"}
)


@dataclass(frozen=True, kw_only=True)
class Staging:
    """Takes arrays through ``pinned_host`` memory, and those that cannot go there the plain way.

    ``window_bytes`` is how much is copied at a time; two windows are under way at once.
    ``on_cpu`` takes arrays of the CPU backend through its memory of that kind as well, so that this way can be tested
    anywhere; there it is slower than the plain one.

    >>> Staging(window_bytes=1 << 20).refusal(x.dtype, x.sharding, x.nbytes)
    'cpu arrays are in host memory as they are'
    """

    window_bytes: int
    on_cpu: bool = False

    def refusal(self, dtype: Any, sharding: Sharding, nbytes: int) -> str | None:
        """Why such an array goes the plain way; None if it goes through pinned memory."""
        device: Any = next(iter(sharding.device_set))
        if device.platform == "cpu" and not self.on_cpu:
            return "cpu arrays are in host memory as they are"
        if jnp.issubdtype(dtype, jax.dtypes.prng_key) or dtype.name in _PACKED:
            return f"numpy has another layout for {dtype} than the device"
        if sharding.memory_kind not in (None, device.default_memory().kind):
            return f"it is in {sharding.memory_kind} memory as it is"
        if not any(memory.kind == _PINNED for memory in device.addressable_memories()):
            return f"{device.platform} devices have no {_PINNED} memory here"
        if not isinstance(sharding, SingleDeviceSharding | NamedSharding):
            return f"a {type(sharding).__name__} has no counterpart in {_PINNED} memory"
        if not 0 < nbytes <= self.window_bytes:
            return f"{nbytes} bytes are not within the window of {self.window_bytes}"
        return None

    # From the device

    def to_host(self, values: Sequence[Any]) -> Iterator[Host]:
        """The values as host arrays in their order; the first window, or all that is within it, is started at once.

        Values are arrays of JAX or numpy.
        A host array may be a view of pinned memory, which it keeps; where there is more than one window it is a copy.
        """
        windows = _windows([self._staged_bytes(value) for value in values], self.window_bytes)
        return self._read(values, windows, self._started(values[windows[0]]))

    def is_apart(self, value: Any) -> bool:
        """Whether a value goes through pinned memory, and thus to memory of its own."""
        return bool(self._staged_bytes(value))

    def under_way(self, values: Sequence[Any]) -> Iterator[Host]:
        """The same for values that may be deleted at once: all copies are started, as far as they are within a window.

        Else it waits for all, because a later window is started when an earlier one has been read.
        """
        if not values:
            return iter(())
        hosts = self.to_host(values)
        return hosts if sum(map(self._staged_bytes, values)) <= self.window_bytes else iter(list(hosts))

    def _staged_bytes(self, value: Any) -> int:
        if not isinstance(value, jax.Array):
            return 0
        return 0 if self.refusal(value.dtype, value.sharding, value.nbytes) else value.nbytes

    def _read(
        self, values: Sequence[Any], windows: Sequence[slice], started: Sequence[Any]
    ) -> Iterator[Host]:
        for window, following in itertools.pairwise([*windows, slice(0, 0)]):
            here, started = started, self._started(values[following])
            for value, source in zip(values[window], here, strict=True):
                host = np.asarray(source)
                yield host.copy() if source is not value and len(windows) > 1 else host

    def _started(self, values: Sequence[Any]) -> list[Any]:
        """Where each value is to be read: from its copy in pinned memory, or from itself."""
        sources = list(values)
        through = [index for index, value in enumerate(values) if self._staged_bytes(value)]
        for index in set(range(len(values))).difference(through):
            if isinstance(values[index], jax.Array):
                values[index].copy_to_host_async()
        replicas = [_one_replica(values[index]) for index in through]
        staged = jax.device_put(replicas, [_pinned(replica.sharding) for replica in replicas])
        for index, source in zip(through, staged, strict=True):
            sources[index] = source
        return sources

    # To the device

    def to_device(self, hosts: Sequence[Host], targets: Sequence[Sharding | None]) -> list[jax.Array]:
        """The host arrays where ``targets`` says; None stands for: uncommitted, on the default device.

        On the CPU backend a 64-byte aligned host array becomes the array's own memory, without a copy.
        It lives as long as the array, and nothing that JAX does writes to it; see decision 0014.
        """
        default = _default_sharding()
        finals = [target or default for target in targets]
        sizes = [
            0 if self.refusal(host.dtype, final, host.nbytes) else host.nbytes
            for host, final in zip(hosts, finals, strict=True)
        ]
        if not any(sizes):
            return list(jax.device_put(list(hosts), list(targets)))
        placed: list[list[jax.Array]] = []
        for window in _windows(sizes, self.window_bytes):
            jax.block_until_ready(placed[-2:-1])
            placed.append(_placed(hosts[window], finals[window], sizes[window]))
        return [
            relabelled(array, committed=target is not None)
            for array, target in zip(itertools.chain(*placed), targets, strict=True)
        ]


def _placed(hosts: Sequence[Host], finals: Sequence[Sharding], sizes: Sequence[int]) -> list[jax.Array]:
    first = [_pinned(final) if size else final for final, size in zip(finals, sizes, strict=True)]
    placed: list[jax.Array] = jax.device_put(jax.device_put(list(hosts), first), list(finals))
    return placed


def _windows(sizes: Sequence[int], most: int) -> list[slice]:
    """Runs of at most ``most`` bytes, one after the other; at least one."""
    starts, filled = [0], 0
    for index, size in enumerate(sizes):
        if filled + size > most:
            starts.append(index)
            filled = 0
        filled += size
    return [slice(*ends) for ends in itertools.pairwise([*starts, len(sizes)])]


def _one_replica(value: jax.Array) -> jax.Array:
    replica: jax.Array = value.addressable_data(0) if value.is_fully_replicated else value
    return replica


def _pinned(sharding: Sharding) -> Sharding:
    return sharding.with_memory_kind(_PINNED)


def _default_sharding() -> Sharding:
    """Where JAX puts what is not committed to a device."""
    sharding: Sharding = jax.device_put(np.empty(0, np.uint8)).sharding
    return sharding
