"""Leaves on several devices of one process: copied from their shards, and back where they are wanted."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType

import residual_client as rc
from residual_client.holding import Holding
from residual_client.snapshot import take_snapshot
from residual_client.staging import Staging
from residual_client.transfer import Residual, leaf_of
from residual_store.errors import MeshMismatch
from residual_store.manifest import Manifest
from residual_store.segments import SegmentPool
from tests.cases.arguments import layer
from tests.cases.case import matrix
from tests.cases.sharded import mesh_of, spread
from tests.client.bits import bits_of


@pytest.mark.parametrize("window", [0, 64, 1 << 20])
def test_a_sharded_leaf_is_copied_from_its_shards(window: int) -> None:
    """Each block once and to its place, through pinned memory or not, and safe from what happens to the arrays."""
    mesh = mesh_of(2, 2, kind=AxisType.Auto)
    arrays = [spread(matrix(8, 8), mesh, *spec) for spec in (("i", "j"), ("i",), (None, "j"), ())]
    wanted = [np.array(array) for array in arrays]
    residuals = [Residual(channel="args_res", path="h", value=array) for array in [*arrays, arrays[0]]]
    holding = Holding.of(residuals)
    assert [len(array.blocks) for array in holding.arrays] == [4, 2, 2, 1]
    assert holding.nbytes == sum(array.nbytes for array in arrays)
    staging = Staging(window_bytes=window, on_cpu=True)
    snapshot = take_snapshot(holding.arrays, staging, SegmentPool(total=1 << 20))
    for array in arrays:
        array.delete()
    hosts = snapshot.hosts()
    assert bits_of(hosts) == bits_of(wanted)
    manifest = Manifest(leaves=tuple(leaf_of(index, one) for index, one in enumerate(_alike(wanted))))
    bundle = holding.places.bundle(manifest, hosts)
    assert bits_of([bundle.array(index) for index in range(5)]) == bits_of([*wanted, wanted[0]])


def _alike(hosts: list[np.ndarray]) -> list[Residual]:
    return [Residual(channel="args_res", path="h", value=host) for host in [*hosts, hosts[0]]]


def test_the_same_values_on_any_mesh_are_the_same_bundle(client: rc.Client) -> None:
    """Digests and bytes do not tell how the leaves were cut, as long as their shards differ."""
    contents: list[str] = []
    forward = jax.jit(lambda x: jax.vjp(jnp.sin, x))
    for spec in (("i",), (None, "i"), (), (("i", "j"),), (("j", "i"), None)):
        mesh = mesh_of(2, 2, kind=AxisType.Auto)
        _, vjp = forward(spread(matrix(8, 8), mesh, *spec))
        handle = client.offload(vjp, f"run/{len(contents)}")
        handle.wait()
        contents.append(client.store.stat(handle.key).content)
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


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_a_stored_backward_runs_on_the_mesh_of_its_cotangent(client: rc.Client, kind: AxisType) -> None:
    """Whose devices may stand in another order than this process has them."""
    devices = np.array(jax.devices())[[2, 0, 3, 1]]
    mesh = jax.sharding.Mesh(devices, ("i",), axis_types=(kind,))
    forward = jax.jit(lambda w, x: jax.vjp(layer, w, x, saveable_args=(False, True)))
    w, x = spread(matrix(), mesh), spread(matrix(8, 4), mesh, "i")
    y, vjp = forward(w, x)
    wanted = bits_of(jax.jit(lambda f, y: f(y))(jax.vjp(layer, w, x)[1], y))
    client.offload(vjp, "run/a").wait()
    backward = client.backward("run/a")
    for _ in range(2):
        assert bits_of(backward(y, args=(w, None))) == wanted


def test_leaves_on_two_meshes_run_no_stored_backward(client: rc.Client) -> None:
    """JAX takes one of the meshes for all; the restore knows better."""
    one, two = mesh_of(4, kind=AxisType.Auto), mesh_of(2, 2, kind=AxisType.Auto)
    arrays = spread(matrix(8, 4), one, "i"), spread(matrix(8, 4), two, "i", "j")
    y, vjp = jax.vjp(lambda a, b: (jnp.sin(a) * a, jnp.sin(b) * b), *arrays)
    handle = client.offload(vjp, "run/a")
    with pytest.raises(MeshMismatch, match=r"mesh\(i=4\) and mesh\(i=2, j=2\), .*; restore it with like="):
        client.backward(handle)(y)
    assert bits_of(client.restore(handle)(y)) == bits_of(vjp(y))
