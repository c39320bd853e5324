"""Leaves on several devices of one process: never gathered on their way to the store, and back where they are wanted."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType

import residual_client as rc
from residual_client.staging import Staging
from residual_client.transfer import Residual, start_copies
from residual_store.blocks import Blocks
from residual_store.errors import MeshMismatch
from tests.cases.arguments import layer
from tests.cases.case import matrix
from tests.cases.sharded import mesh_of, spread

_PLAIN = Staging(window_bytes=1 << 20)


def _copies_of(*arrays: Any) -> list[Any]:
    residuals = [Residual(channel="args_res", path="h", value=array) for array in arrays]
    return list(start_copies(residuals, _PLAIN))


def test_a_sharded_leaf_is_not_gathered() -> None:
    """What goes to the store are views of the shards on their devices, each block once, and a replicated leaf is one."""
    mesh = mesh_of(2, 2, kind=AxisType.Auto)
    cut, rows, whole = (spread(matrix(8, 8), mesh, *spec) for spec in (("i", "j"), ("i",), ()))
    copies = _copies_of(cut, rows, whole)
    assert [len(copy.blocks) if isinstance(copy, Blocks) else 1 for copy in copies] == [4, 2, 1]
    for array, copy in zip((cut, rows, whole), copies, strict=True):
        blocks = list(copy.blocks.values()) if isinstance(copy, Blocks) else [copy]
        shards = [np.asarray(shard.data) for shard in array.addressable_shards]
        assert all(any(np.shares_memory(block, shard) for shard in shards) for block in blocks)
        gathered = copy.gathered() if isinstance(copy, Blocks) else copy
        assert gathered.tobytes() == np.asarray(array).tobytes()


def test_the_same_values_on_any_mesh_are_the_same_bundle(client: rc.Client) -> None:
    """Digests and bytes do not tell how the leaves were cut."""
    contents: list[str] = []
    forward = jax.jit(lambda x: jax.vjp(jnp.sin, x))
    for spec in (("i",), (None, "i"), (), (("i", "j"),), (("j", "i"), None)):
        mesh = mesh_of(2, 2, kind=AxisType.Auto)
        _, vjp = forward(spread(matrix(8, 8), mesh, *spec))
        contents.append(client.store.stat(client.offload(vjp, f"run/{len(contents)}").key).content)
    assert len(set(contents)) == 1


@pytest.mark.parametrize("devices", [1, 2])
def test_real_leaves_of_like_say_where_to(client: rc.Client, devices: int) -> None:
    """A leaf goes onto the mesh of ``like`` where that has the same program."""
    forward = jax.jit(lambda w, x: jax.vjp(layer, w, x))
    few = jax.make_mesh((devices,), ("i",), axis_types=(AxisType.Auto,), devices=jax.devices()[:devices])
    many = mesh_of(4, kind=AxisType.Auto)
    _, vjp = forward(spread(matrix(), many), spread(matrix(8, 4), many, "i"))
    _, like = forward(spread(matrix(), few), spread(matrix(8, 4), few, "i"))
    client.offload(vjp, "run/a")
    restored = client.restore("run/a", like=like)
    for one, leaf, wanted in zip(*map(jax.tree.leaves, (restored, vjp, like)), strict=True):
        assert one.sharding.device_set == wanted.sharding.device_set
        assert np.asarray(one).tobytes() == np.asarray(leaf).tobytes()


def test_a_program_of_another_mesh_is_refused_with_both_named(client: rc.Client) -> None:
    """With explicit axes the mesh is a part of the program."""
    forward = jax.jit(lambda x: jax.vjp(jnp.sin, x))
    few = jax.make_mesh((2,), ("i",), axis_types=(AxisType.Explicit,), devices=jax.devices()[:2])
    client.offload(forward(spread(matrix(8, 4), mesh_of(4), "i"))[1], "run/a")
    with pytest.raises(MeshMismatch, match=r"made on mesh\(i=4\) .* is on mesh\(i=2\), .* another program"):
        client.restore("run/a", like=forward(spread(matrix(8, 4), few, "i"))[1])
