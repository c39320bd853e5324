"""A process that restores leaves over memory which nobody may write to, and has them overwritten in every way.

``python -m tests.client.read_only_child [force]``: a write kills it with SIGSEGV; with ``force`` it writes, to show that.
It prints each way before it takes it, and ``unchanged`` in the end.
"""

from __future__ import annotations

import ctypes
import mmap
import sys
import tempfile
import warnings

import jax
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

from residual_client.restore import place_leaves
from residual_client.staging import Staging
from residual_store import Bundle
from residual_store.copier import Copier
from residual_store.errors import DataLoss
from tests.cases.sharded import mesh_of
from tests.client.overwriting import ON_ONE_DEVICE, WAYS

_SHAPE = (64, 1024)


def _read_only(arrays: dict[str, np.ndarray]) -> Bundle:
    """A bundle over a file that is mapped for reading only, as a shared segment is."""
    bundle = Bundle.of_arrays(arrays)
    with tempfile.TemporaryFile() as file:
        file.truncate(bundle.manifest.nbytes)
        writable = mmap.mmap(file.fileno(), 0)
        manifest = bundle.copied_into(np.frombuffer(writable, np.uint8), copier=Copier()).manifest
        mapped = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
    return Bundle.of_segment(manifest, np.frombuffer(mapped, np.uint8))


def _placements() -> dict[str, Sharding | None]:
    mesh = mesh_of(4, kind=AxisType.Auto)
    return {
        "uncommitted": None,
        "committed": SingleDeviceSharding(jax.devices()[1]),
        "replicated": NamedSharding(mesh, PartitionSpec()),
        "split": NamedSharding(mesh, PartitionSpec("i")),
    }


def _restored(bundle: Bundle, index: int, placement: Sharding | None) -> jax.Array:
    leaf: jax.Array = place_leaves(
        bundle, [placement] * len(bundle.payloads), live=(), staging=Staging(window_bytes=0)
    )[index]
    address = leaf.addressable_data(0).unsafe_buffer_pointer()
    assert address == bundle.payloads[index].ctypes.data, "the leaf is a copy, so nothing is shown"
    return leaf


def main() -> None:
    placements = _placements()
    numbers = np.arange(np.prod(_SHAPE), dtype=np.float32).reshape(_SHAPE)
    bundle = _read_only({name: numbers + index for index, name in enumerate(placements)})
    for index, (where, placement) in enumerate(placements.items()):
        for name, way in WAYS.items():
            if name in ON_ONE_DEVICE and where in ("replicated", "split"):
                continue
            print(where, name, flush=True)
            jax.block_until_ready(way(_restored(bundle, index, placement)))
    bundle.verify(DataLoss)
    if sys.argv[1:] == ["force"]:
        print("force", flush=True)
        ctypes.memset(_restored(bundle, 0, None).unsafe_buffer_pointer(), 0, 1)
    print("unchanged")


if __name__ == "__main__":
    # XLA says so where it cannot use a donated buffer.
    warnings.filterwarnings("ignore", "Some donated buffers were not usable")
    main()
