"""Transfer: residual arrays from the device to host memory, and back to where and what they were."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
from jax.sharding import NamedSharding, Sharding, SingleDeviceSharding

from residual_client.jax_compat import key_impl, relabelled
from residual_client.meshes import Meshes, symbolic
from residual_client.staging import Staging
from residual_store.dtypes import DTYPES, FLOAT0, name_of
from residual_store.errors import LeafMismatch, LeafUnavailable, PrecisionMismatch
from residual_store.frame import aligned_empty
from residual_store.leaf import Aval, Channel, Leaf

__all__ = [
    "Residual",
    "abstract",
    "as_host",
    "check_precision",
    "check_readable",
    "is_key",
    "leaf_of",
    "placement_for",
    "placement_of",
    "to_device",
    "x64_enabled",
]

type Host = npt.NDArray[np.generic]

_WIDE = ("float64", "complex128", "int64", "uint64")


@dataclass(frozen=True, kw_only=True)
class Residual:
    """One leaf of a VJP object: its place, and its value, a `jax.Array`, a numpy array or an abstract value.

    ``expected`` is the abstract value that the backward was traced with, if it reads the leaf.
    """

    channel: Channel
    path: str
    value: Any
    expected: Any = None

    @property
    def is_mapped(self) -> bool:
        """Whether the leaf has another shape than the backward expects, as in a VJP object that `jax.vmap` made."""
        return self.expected is not None and tuple(self.value.shape) != tuple(self.expected.shape)


def is_key(value: Any) -> bool:
    """Whether a value is an array of typed PRNG keys."""
    # All other types are those of numpy, which is quickly seen.
    return not isinstance(value.dtype, np.dtype) and bool(jnp.issubdtype(value.dtype, jax.dtypes.prng_key))


def abstract(value: Any) -> Aval:
    """Shape, dtype and weak type of an array or abstract value; keys have the dtype ``key<impl>``."""
    if is_key(value):
        name = f"key<{key_impl(value.dtype)}>"
    else:
        name = FLOAT0 if value.dtype == jax.dtypes.float0 else name_of(np.dtype(value.dtype))
    return Aval(dtype=name, shape=tuple(value.shape), weak_type=bool(getattr(value, "weak_type", False)))


def check_readable(residuals: Iterable[Residual]) -> None:
    """Raise `LeafUnavailable` or `LeafMismatch`, which names the leaf, unless every leaf can be read as it was traced."""
    for residual in residuals:
        _check_dtype(residual)
        _check_value(residual)


def _check_dtype(residual: Residual) -> None:
    expected = residual.expected
    if expected is not None and hasattr(residual.value, "dtype") and residual.value.dtype != expected.dtype:
        raise LeafMismatch(
            f"{residual.path} is {residual.value.dtype} and the backward was traced for {expected.dtype}; "
            "it was changed after jax.vjp, and JAX may apply it without a word",
            leaf=residual.path,
        )


def _check_value(residual: Residual) -> None:
    value = residual.value
    if isinstance(value, jax.core.Tracer):
        raise LeafUnavailable(
            f"{residual.path} is being traced, so it has no value to store; "
            "return the VJP object from the jitted function and offload it outside",
            leaf=residual.path,
        )
    if isinstance(value, jax.Array):
        _check_array(residual.path, value)
        _check_key(residual.path, value)
    elif not isinstance(value, np.ndarray | np.generic):
        raise LeafUnavailable(
            f"{residual.path} is a {type(value).__name__} and not an array; only arrays can be stored",
            leaf=residual.path,
        )


def _check_array(path: str, value: jax.Array) -> None:
    if value.is_deleted():
        raise LeafUnavailable(
            f"{path} was deleted or donated before it could be offloaded; "
            "offload before the call that donates it, or do not donate it",
            leaf=path,
        )
    if getattr(getattr(value.sharding, "spec", None), "unreduced", None):
        raise LeafUnavailable(
            f"{path} is a sum that is still to be made over devices ({value.sharding}), so it has no value to store",
            leaf=path,
        )


def _check_key(path: str, value: jax.Array) -> None:
    if is_key(value) and not isinstance(jax.random.key_impl(value), str):
        raise LeafUnavailable(
            f"{path} has PRNG keys of the implementation {key_impl(value.dtype)!r}, which JAX does not find by that name "
            "when they are restored; use one of JAX's own, such as threefry2x32",
            leaf=path,
        )


def leaf_of(index: int, residual: Residual) -> Leaf:
    """The manifest's entry of a residual, before its bytes are encoded."""
    value = residual.value
    sharding = getattr(value, "sharding", None)
    aval = abstract(value)
    leaf = Leaf(
        index=index,
        channel=residual.channel,
        path=residual.path,
        dtype=aval.dtype,
        shape=aval.shape,
        weak_type=aval.weak_type,
        committed=bool(getattr(value, "committed", False)),
        memory_kind=getattr(sharding, "memory_kind", None),
        sharding=symbolic(sharding, value.ndim),
    )
    if not is_key(value):
        return leaf
    data = jax.eval_shape(jax.random.key_data, value)
    return leaf.changed(
        kind="key",
        key_impl=key_impl(value.dtype),
        dtype=name_of(np.dtype(data.dtype)),
        shape=data.shape,
    )


def x64_enabled() -> bool:
    """Whether 64-bit types are on in this thread."""
    return bool(jax.config.jax_enable_x64)


def check_precision(named: Sequence[tuple[str, str]]) -> None:
    """Raise `PrecisionMismatch` if a (path, dtype) is 64 bits wide and this process would cut it to 32."""
    if x64_enabled():
        return
    for path, dtype in named:
        if dtype in _WIDE:
            raise PrecisionMismatch(
                f"{path} is {dtype}, and jax_enable_x64 is off here, so JAX would cut it to 32 bits; "
                "set jax_enable_x64, as the process that made the bundle did",
                leaf=path,
            )


def to_device(
    hosts: Sequence[Host], leaves: Sequence[Leaf], targets: Sequence[Sharding | None], staging: Staging
) -> list[Any]:
    """The restored leaves: values, weak type, key type, and the placement of ``targets``, see `placement_for`.

    All arrays are on their way at once, and nothing waits for them.
    float0 stays a numpy array, because JAX has no device array of it.
    """
    plain = [
        leaf.kind == "array" and leaf.dtype != FLOAT0 and not _is_spread(target)
        for leaf, target in zip(leaves, targets, strict=True)
    ]
    arrays = iter(
        staging.to_device(
            [_dense(host) for host in itertools.compress(hosts, plain)],
            list(itertools.compress(targets, plain)),
        )
    )
    return [
        relabelled(next(arrays), weak_type=leaf.weak_type) if is_plain else _special(host, leaf, target)
        for host, leaf, target, is_plain in zip(hosts, leaves, targets, plain, strict=True)
    ]


def _dense(host: Host) -> Host:
    """The host array without strides; JAX takes one element at a time of a constant that is merely broadcast."""
    if host.flags.c_contiguous:
        return host
    words = host.view(f"u{host.itemsize}") if host.itemsize <= 8 else host
    dense = aligned_empty(host.nbytes).view(words.dtype).reshape(host.shape)
    dense[...] = words
    return dense.view(host.dtype)


def _special(host: Host, leaf: Leaf, target: Sharding | None) -> Any:
    if leaf.dtype == FLOAT0:
        return np.zeros(leaf.shape, DTYPES[FLOAT0])
    if target is not None and _is_spread(target):
        # Not device_put, which compares the values of all processes with each other.
        shards = jax.make_array_from_callback(host.shape, target, lambda index: host[index])
        return _wrapped(relabelled(shards, weak_type=leaf.weak_type), leaf)
    # The spec of a key array is shorter than that of its data, so the keys are placed after they are wrapped.
    keys = _wrapped(jax.device_put(host), leaf)
    return keys if target is None else jax.device_put(keys, target)


def as_host(host: Host, leaf: Leaf) -> Any:
    """The restored leaf as a host array; keys are an array of JAX, which numpy does not have."""
    return host if leaf.kind == "array" else _special(host, leaf, None)


def _is_spread(target: Sharding | None) -> bool:
    """Whether an array there would lie on devices of several processes."""
    return target is not None and not target.is_fully_addressable


def _wrapped(data: jax.Array, leaf: Leaf) -> jax.Array:
    return data if leaf.kind == "array" else jax.random.wrap_key_data(data, impl=leaf.key_impl)


def placement_for(leaf: Leaf, meshes: Meshes) -> Sharding | None:
    """Where a leaf belongs by its record; None stands for: uncommitted, on the default device."""
    if leaf.sharding is not None:
        return meshes.sharding(leaf.sharding, leaf.path, memory_kind=leaf.memory_kind)
    if not leaf.committed:
        return None
    return SingleDeviceSharding(meshes.device, memory_kind=leaf.memory_kind)


def placement_of(value: Any) -> Sharding | None:
    """Where a live leaf is, for a restore in the same process; None if it is uncommitted or no device array."""
    if isinstance(value, jax.Array) and (value.committed or isinstance(value.sharding, NamedSharding)):
        return value.sharding
    return None
