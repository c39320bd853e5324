"""Bundles for tests, and comparing them bit by bit."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from residual_store import Bundle
from residual_store.digest import NO_DIGEST
from residual_store.dtypes import DTYPES, FLOAT0
from residual_store.leaf import MeshSharding
from residual_store.manifest import UserValue, encode

__all__ = ["assert_equal", "every_dtype", "filled", "noise", "sharded", "split", "values_of"]

type Host = npt.NDArray[np.generic]


def values_of(name: str, shape: tuple[int, ...], *, seed: int = 0) -> Host:
    """Host values of a dtype by its canonical name: random bits where all bits are values, random values else."""
    dtype, rng = DTYPES[name], np.random.default_rng(seed)
    if name == FLOAT0:
        return np.zeros(shape, dtype)
    count = int(np.prod(shape, dtype=np.int64))
    if name == "bool":
        return rng.integers(0, 2, count).astype(dtype).reshape(shape)
    if name in {"int1", "int2", "int4", "uint1", "uint2", "uint4"}:
        bits = int(name[-1])
        low = -(1 << (bits - 1)) if name.startswith("int") else 0
        return (rng.integers(0, 1 << bits, count) + low).astype(np.int8).astype(dtype).reshape(shape)
    if name.startswith(("float4_", "float6_")):
        return rng.integers(0, 1 << int(name[5]), count).astype(np.uint8).view(dtype).reshape(shape)
    return np.frombuffer(rng.bytes(count * dtype.itemsize), dtype).reshape(shape)


def every_dtype(shape: tuple[int, ...] = (3, 5)) -> Bundle:
    """One leaf of each dtype that a residual of JAX can have."""
    return Bundle.of_arrays({name: values_of(name, shape, seed=i) for i, name in enumerate(DTYPES)})


def split(count: int, *, ndim: int = 1) -> MeshSharding:
    """The sharding of an array whose dimension 0 is split over so many devices."""
    spec = (("i",), *[()] * (ndim - 1))
    return MeshSharding(axis_names=("i",), axis_sizes=(count,), axis_types=("Auto",), spec=spec)


def sharded(arrays: Mapping[str, tuple[Host, int]], *, user: Mapping[str, UserValue] | None = None) -> Bundle:
    """A bundle of named arrays, each with the number of devices that its dimension 0 is split over."""
    hosts = [host for host, _ in arrays.values()]
    manifest = Bundle.of_arrays({name: host for name, (host, _) in arrays.items()}, user=user).manifest
    leaves = [
        leaf.changed(
            encoding="raw",
            alias_of=None,
            same_array=False,
            digest=NO_DIGEST,
            sharding=split(count, ndim=host.ndim) if count > 1 else None,
        )
        for leaf, (host, count) in zip(manifest.leaves, arrays.values(), strict=True)
    ]
    return Bundle.encoded(replace(manifest, leaves=tuple(leaves)), hosts, identities=list(map(id, hosts)))


def noise(*sizes: int, seed: int = 0) -> Bundle:
    """Leaves of random bytes with these sizes; no encoding makes them smaller."""
    rng = np.random.default_rng(seed)
    return Bundle.of_arrays(
        {f"leaf {i}": np.frombuffer(rng.bytes(size), np.uint8) for i, size in enumerate(sizes)}
    )


def filled(value: int, *, leaves: int = 4, size: int = 3000) -> Bundle:
    """Leaves that all say ``value`` without being constant, so that a mixture of two bundles is seen at once."""
    row = np.full(size, value, np.int32)
    row[0] = -1
    return Bundle.of_arrays({f"leaf {i}": np.append(row, i) for i in range(leaves)})


def assert_equal(got: Bundle, sent: Bundle) -> None:
    """Equal manifests, and equal dtype, shape and bytes of every leaf."""
    sent = sent.sealed()
    assert encode(got.manifest) == encode(sent.manifest)
    for leaf in sent.manifest.leaves:
        one, other = got.array(leaf.index), sent.array(leaf.index)
        assert (one.dtype, one.shape) == (other.dtype, other.shape), leaf.path
        assert one.tobytes() == other.tobytes(), leaf.path
