"""Through pinned memory every leaf comes back as it does the plain way, a window of bytes at a time.

The CPU backend has that memory kind too, so the way of an accelerator is taken here.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec, SingleDeviceSharding
from jax.tree_util import tree_leaves

import residual_client as rc
from residual_client.shards import Shards
from residual_client.snapshot import take_snapshot
from residual_client.staging import Staging
from residual_client.transfer import Residual
from residual_store.errors import LeafUnavailable
from residual_store.segments import SegmentPool
from residual_store.store import Store, open_store
from tests.cases import CASES
from tests.cases.sharded import mesh_of
from tests.client.bits import bits_of
from tests.client.direct import direct

_STAGED_CASES = [
    name
    for name, make in CASES.items()
    if make.__module__.rpartition(".")[2] in ("dtypes", "shapes", "sharded")
    and not make().missing_on(jax.__version__)
]
_ALL = Staging(window_bytes=1 << 30, on_cpu=True)
_NARROW = Staging(window_bytes=64, on_cpu=True)


@pytest.fixture(scope="module")
def store() -> Iterator[Store]:
    """A store in this process."""
    with open_store("memory://") as store:
        yield store


def _kind_of(leaf: jax.Array) -> tuple[Any, ...]:
    """What a leaf is besides its values: where it lies, in which memory, and how JAX treats it."""
    return leaf.sharding, leaf.sharding.memory_kind, leaf.committed, getattr(leaf, "weak_type", None)


@pytest.mark.parametrize("staging", [_ALL, _NARROW], ids=["all", "narrow"])
@pytest.mark.parametrize("name", _STAGED_CASES)
def test_a_case_comes_back_through_pinned_memory(name: str, staging: Staging, store: Store) -> None:
    """Record, leaves, placements and gradient are those of the direct way, to the last bit."""
    known = direct(name)
    plain, staged = rc.Client(store), rc.Client(store, staging=staging)
    with known.case.context():
        handle = staged.offload(known.vjp)
        other = plain.offload(known.vjp)
        assert handle.wait().leaves == other.wait().leaves
        assert store.manifest(handle.key).leaves == store.manifest(other.key).leaves
        leaves, restored = tree_leaves(known.vjp), tree_leaves(staged.restore(handle))
        assert bits_of(restored) == bits_of(leaves)
        for one, other in zip(leaves, restored, strict=True):
            assert not isinstance(one, jax.Array) or _kind_of(other) == _kind_of(one)
        gradient = staged.restore(handle, args=known.case.args)(known.cotangent)
        assert bits_of(gradient) == bits_of(known.eager)


# What goes through


def _arrays(count: int = 6) -> list[jax.Array]:
    """Arrays of 1 KiB."""
    return [jnp.arange(256, dtype=jnp.float32) + 1000 * index for index in range(count)]


def _staged() -> int:
    """Bytes of all arrays in pinned memory but those that the cases have there."""
    pinned = [array for array in jax.live_arrays() if array.sharding.memory_kind == "pinned_host"]
    return sum(array.nbytes for array in pinned if array.shape == (256,))


def test_what_fits_is_read_in_pinned_memory() -> None:
    """All copies are under way before the first is asked for, and a host array is a view of one, which it keeps."""
    values = _arrays()
    copies = Staging(window_bytes=6 << 10, on_cpu=True).to_host(values)
    assert _staged() == 6 << 10
    hosts = list(copies)
    assert bits_of(hosts) == bits_of([np.asarray(value) for value in values])
    assert not any(host.flags.owndata or host.flags.writeable for host in hosts)
    assert not any(map(np.shares_memory, hosts, map(np.asarray, values)))


def test_what_does_not_fit_is_read_in_two_windows_at_a_time() -> None:
    """Then host arrays are copies, so that the windows behind them are free again."""
    values, staging = _arrays(9), Staging(window_bytes=2 << 10, on_cpu=True)
    hosts, most = [], 0
    for host in staging.to_host(values):
        hosts.append(host)
        most = max(most, _staged())
    assert most == 4 << 10
    assert bits_of(hosts) == bits_of([np.asarray(value) for value in values])
    assert all(host.flags.owndata for host in hosts)
    placed = staging.to_device(hosts, [None] * 9)
    assert bits_of(placed) == bits_of(values)
    del host, hosts
    assert _staged() == 0


@pytest.mark.parametrize("window", [0, 64, 1 << 20])
def test_a_snapshot_outlives_its_arrays(window: int) -> None:
    """Whether copied at the call, within one window, or within several."""
    values = [jnp.arange(16.0) + index for index in range(3)]
    wanted = [np.array(value) for value in values]
    snapshot = take_snapshot(
        _shards(values), Staging(window_bytes=window, on_cpu=True), SegmentPool(total=1 << 20)
    )
    for value in values:
        value.delete()
    assert bits_of(snapshot.hosts()) == bits_of(wanted)


def test_a_leaf_that_cannot_be_read_is_named() -> None:
    """Also where it is lost after all was checked."""
    values = [jnp.arange(16.0), jnp.arange(16.0) + 1]
    values[1].delete()
    with pytest.raises(LeafUnavailable, match=r"args\[1\] cannot be read: .*deleted"):
        take_snapshot(_shards(values), Staging(window_bytes=64), SegmentPool(total=1 << 20))


def _shards(values: list[jax.Array]) -> list[Shards]:
    return [
        Shards.of(Residual(channel="args_res", path=f"args[{index}]", value=value))
        for index, value in enumerate(values)
    ]


@pytest.mark.parametrize(
    ("array", "reason"),
    [
        (lambda: jnp.arange(4).astype(jnp.int4), "numpy has another layout for int4"),
        (lambda: jax.random.key(0), "numpy has another layout for key<fry>"),
        (lambda: jnp.zeros((0, 3)), "0 bytes are not within"),
        (lambda: jnp.zeros(65, jnp.uint8), "65 bytes are not within the window of 64"),
        (
            lambda: jax.device_put(jnp.ones(3), _on_device("pinned_host")),
            "it is in pinned_host memory as it is",
        ),
        (lambda: jax.device_put(jnp.ones(3), _on_device("unpinned_host")), "it is in unpinned_host memory"),
    ],
)
def test_what_cannot_go_through_says_why(array: Any, reason: str) -> None:
    """The reason names what is in the way; such an array is copied directly."""
    made = array()
    refusal = _NARROW.refusal(made.dtype, made.sharding, 0 if made.ndim == 0 else made.nbytes)
    assert refusal is not None
    assert reason in refusal


@pytest.mark.parametrize("spec", [None, PartitionSpec(), PartitionSpec("i")])
def test_by_default_arrays_of_the_cpu_go_the_plain_way(spec: PartitionSpec | None) -> None:
    """They are in host memory as they are, and with ``on_cpu`` they go through, on one device or on several."""
    array = jnp.ones(16) if spec is None else jax.device_put(jnp.ones(16), NamedSharding(mesh_of(4), spec))
    question = array.dtype, array.sharding, array.nbytes
    assert Staging(window_bytes=64).refusal(*question) == "cpu arrays are in host memory as they are"
    assert _NARROW.refusal(*question) is None


def _on_device(memory_kind: str) -> SingleDeviceSharding:
    return SingleDeviceSharding(jax.devices()[0], memory_kind=memory_kind)
