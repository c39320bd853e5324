"""A leaf is copied once at the call, because its memory may be anybody's, and restored in the memory of the bundle.

So that memory must live as long as the array, be free soon after, and never change through it.
"""

from __future__ import annotations

import gc
import signal
import subprocess
import sys
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.tree_util import tree_leaves

import residual_client as rc
from residual_client.jax_compat import release_dead_arrays
from residual_client.restore import place_leaves
from residual_client.staging import Staging
from residual_store import Bundle, Settings
from residual_store.copier import Copier
from residual_store.errors import DataLoss
from residual_store.frame import aligned_empty
from tests.client.bits import bits_of
from tests.client.overwriting import WAYS
from tests.servers import until

_REPOSITORY = Path(__file__).parents[2]


def _keeping(*arrays: Any) -> Any:
    """A VJP object whose residuals are these arrays."""

    @jax.custom_vjp
    def kept(x: Any) -> Any:
        return x

    kept.defvjp(lambda x: (x, arrays), lambda saved, ct: (ct * sum(a.astype(ct.dtype).sum() for a in saved),))
    return jax.vjp(kept, jnp.float32(2))[1]


def _numbers(shape: tuple[int, ...] = (64, 1024), dtype: str = "float32") -> jax.Array:
    """Elements that differ."""
    return jnp.asarray((np.arange(1, np.prod(shape) + 1) % 113).reshape(shape).astype(jnp.dtype(dtype)))


# From the array to the store


@pytest.mark.parametrize(
    "dtype", ["bfloat16", "float16", "float32", "int8", "uint32", "complex64", "float8_e4m3fn", "float8_e5m2"]
)
@pytest.mark.parametrize("shape", [(7,), (5, 64), (2, 3, 4)])
def test_what_is_stored_is_what_stood_there_at_the_call(
    client: rc.Client, dtype: str, shape: tuple[int, ...]
) -> None:
    """JAX uses aligned host memory in place, so a leaf may change with a buffer that somebody else writes to."""
    wanted = np.asarray(_numbers(shape, dtype))
    buffer = aligned_empty(wanted.nbytes)
    buffer[:] = wanted.reshape(-1).view(np.uint8)
    leaf = jax.device_put(buffer.view(wanted.dtype).reshape(shape))
    handle = client.offload(_keeping(leaf))
    buffer[:] = 0
    assert not np.asarray(leaf).view(np.uint8).any()
    assert bits_of(tree_leaves(client.restore(handle))) == bits_of([wanted])
    handle.wait()
    assert bits_of(tree_leaves(client.restore(handle))) == bits_of([wanted])


# From the store to the array


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float8_e4m3fn"])
@pytest.mark.parametrize("device", [None, 1])
def test_a_restored_leaf_is_the_memory_of_the_bundle(
    client: rc.Client, dtype: str, device: int | None
) -> None:
    """JAX takes the bytes where they are, on the default device and on another one."""
    leaf = _numbers(dtype=dtype)
    vjp = _keeping(leaf if device is None else jax.device_put(leaf, jax.devices()[device]))
    client.offload(vjp, "run/a").wait()
    (restored,) = tree_leaves(client.restore("run/a"))
    (payload,) = client.store.get("run/a").payloads
    assert restored.unsafe_buffer_pointer() == payload.ctypes.data
    assert restored.committed == (device is not None)


@pytest.mark.parametrize(
    ("dtype", "element"),
    [
        ("bfloat16", b"\x81\x7f"),
        ("float16", b"\x01\xfc"),
        ("float32", b"\x01\x00\xa0\xff"),
        ("complex64", b"\x01\x00\xa0\x7f\x00\x00\x00\x80"),
        ("float8_e4m3fn", b"\x7f"),
        ("int8", b"\x81"),
        ("bool", b"\x01"),
    ],
)
def test_a_constant_leaf_comes_back_bit_for_bit(client: rc.Client, dtype: str, element: bytes) -> None:
    """It is one element in the store and is written out for JAX: a signalling NaN with its payload, too."""
    leaf = jax.device_put(np.frombuffer(element * 4096, jnp.dtype(dtype)).reshape(64, 64))
    handle = client.offload(_keeping(leaf))
    handle.wait()
    assert client.store.manifest(handle.key).leaves[0].encoding == "constant"
    (restored,) = tree_leaves(client.restore(handle))
    assert np.asarray(restored).tobytes() == element * 4096
    assert (restored.dtype, restored.shape) == (leaf.dtype, leaf.shape)


@pytest.mark.filterwarnings("ignore:Some donated buffers were not usable")
@pytest.mark.parametrize("way", WAYS)
def test_the_store_stays_as_it_is_when_a_restored_leaf_is_overwritten(client: rc.Client, way: str) -> None:
    """A second restore has the same bits, and so has a leaf that shares the bytes because they are equal."""
    vjp = _keeping(_numbers(), _numbers() + 0)
    wanted = bits_of(tree_leaves(vjp))
    handle = client.offload(vjp, "run/a")
    handle.wait()
    first, other = tree_leaves(client.restore(handle))
    assert first.unsafe_buffer_pointer() == other.unsafe_buffer_pointer()
    jax.block_until_ready(WAYS[way](first))
    assert bits_of([other, other]) == wanted
    assert bits_of(tree_leaves(client.restore(handle))) == wanted
    client.store.get("run/a").verify(DataLoss)


def test_nothing_that_jax_does_writes_to_the_memory_under_a_leaf() -> None:
    """Over a map that is read-only each way to overwrite an array is harmless; a write is SIGSEGV."""
    assert _child() == (0, "unchanged")
    assert _child("force") == (-signal.SIGSEGV, "force")


def _child(*arguments: str) -> tuple[int, str]:
    command = [sys.executable, "-W", "error", "-m", "tests.client.read_only_child", *arguments]
    done = subprocess.run(command, cwd=_REPOSITORY, capture_output=True, text=True, timeout=120, check=False)
    return done.returncode, done.stdout.splitlines()[-1]


# As long as the array


_ENDS: Mapping[str, Callable[[jax.Array], Any]] = {
    "dropped": lambda leaf: None,
    "deleted": lambda leaf: leaf.delete(),
    "donated": WAYS["arithmetic"],
}


@pytest.mark.parametrize("end", _ENDS)
def test_memory_is_held_as_long_as_the_leaf_lives_and_no_longer(client: rc.Client, end: str) -> None:
    """The bundle is deleted and the array still has its bytes; when the array is gone, so is the memory."""
    leaf, tiny = _numbers(), _keeping(jnp.zeros(()))
    handle = client.offload(_keeping(leaf), "run/a")
    handle.wait()
    restored = tree_leaves(client.restore(handle))
    client.delete(handle)
    gc.collect()
    assert client.store.usage().host_held_bytes >= leaf.nbytes
    assert bits_of(restored) == bits_of([leaf])
    jax.block_until_ready(_ENDS[end](restored[0]))
    restored.clear()

    def is_free() -> bool:
        client.offload(tiny).wait()
        return client.store.usage().host_held_bytes < leaf.nbytes

    # JAX's own threads let go of a donated buffer, some time after its values are ready.
    until(is_free, what="the memory given back")


def test_a_view_of_a_leaf_holds_the_memory_too(client: rc.Client) -> None:
    """What numpy sees of an array stays when the array and the bundle are gone."""
    leaf = _numbers()
    handle = client.offload(_keeping(leaf), "run/a")
    handle.wait()
    view = np.asarray(tree_leaves(client.restore(handle))[0])
    client.delete(handle)
    gc.collect()
    assert client.store.usage().host_held_bytes >= leaf.nbytes
    assert bits_of(view) == bits_of(np.asarray(leaf))


def test_a_store_with_room_for_one_bundle_serves_a_loop() -> None:
    """Step after step, the memory of the last one is free in time for the next, without a garbage collection."""
    steps = [_numbers() + step for step in range(5)]
    vjps = [_keeping(leaf) for leaf in steps]
    settings = Settings(host_bytes=2 * steps[0].nbytes - 1)
    gc.disable()
    try:
        with rc.connect("memory://", settings=settings) as client:
            for leaf, vjp in zip(steps, vjps, strict=True):
                handle = client.offload(vjp)
                (restored,) = tree_leaves(client.restore(handle))
                client.delete(handle)
                assert bits_of(restored) == bits_of(leaf)
                del restored
    finally:
        gc.enable()


def test_memory_is_not_used_again_under_a_computation_that_reads_it() -> None:
    """It is overwritten in the very moment in which it is free, and the computation has read all of it by then."""
    numbers = np.arange(1 << 20, dtype=np.float32)
    memory = aligned_empty(numbers.nbytes)
    segment = np.frombuffer(memoryview(memory), np.uint8)
    weakref.finalize(segment, memory.fill, 255)
    bundle = Bundle.of_arrays({"h": numbers}).copied_into(memory[:], copier=Copier())
    bundle = Bundle.of_segment(bundle.manifest, segment)
    leaves = place_leaves(bundle, None, live=(), staging=Staging(window_bytes=0))
    slow = jax.jit(lambda x: jax.lax.fori_loop(0, 50, lambda i, y: jnp.sin(y) + x, x))
    wanted = bits_of(slow(numbers))
    assert leaves[0].unsafe_buffer_pointer() == memory.ctypes.data
    result = slow(leaves[0])
    del bundle, segment
    leaves.clear()
    release_dead_arrays()
    assert bits_of(result) == wanted

    def is_free() -> bool:
        release_dead_arrays()
        return bool(memory[0] == memory[-1] == 255)

    until(is_free)
