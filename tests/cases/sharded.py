"""Several devices: meshes of both kinds, replicas, per-device scalars, and placements."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from tests.cases.arguments import layer
from tests.cases.case import Case, matrix, ramp, registered


def mesh_of(*sizes: int, kind: AxisType = AxisType.Explicit) -> Mesh:
    """A mesh over all four devices with the axes i, j and so on."""
    return jax.make_mesh(sizes, tuple("ijk"[: len(sizes)]), axis_types=(kind,) * len(sizes))


def spread(array: Any, mesh: Mesh, *spec: Any) -> jax.Array:
    """The array on the mesh."""
    placed: jax.Array = jax.device_put(array, NamedSharding(mesh, PartitionSpec(*spec)))
    return placed


def _rows(rows: int = 8, columns: int = 2) -> jax.Array:
    return jnp.arange(float(rows * columns)).reshape(rows, columns) * 0.1


@registered
def shard_map_scalar_residual() -> Case:
    mesh = mesh_of(4)
    spec = PartitionSpec("i")
    summed = jax.shard_map(
        lambda a: jnp.sin(a) * jax.lax.psum(a.sum(), "i"), mesh=mesh, in_specs=spec, out_specs=spec
    )
    return Case(fn=summed, args=(spread(_rows(), mesh, "i"),), needs_devices=4)


@registered
def shard_map_weights_not_saveable() -> Case:
    mesh = mesh_of(4)
    spec = PartitionSpec("i")
    dense = jax.shard_map(
        lambda w, x: jnp.tanh(x @ w), mesh=mesh, in_specs=(PartitionSpec(), spec), out_specs=spec
    )
    args = (spread(matrix(2, 2), mesh), spread(_rows(), mesh, "i"))
    return Case(fn=dense, args=args, saveable_args=(False, True), needs_devices=4)


@registered
def sharded_explicit_mesh() -> Case:
    args = (spread(_rows(), mesh_of(4), "i"),)
    return Case(fn=lambda a: jnp.sum(jnp.sin(a) ** 2), args=args, needs_devices=4)


@registered
def sharded_explicit_mesh_array_output() -> Case:
    args = (spread(_rows(), mesh_of(4), "i"),)
    return Case(fn=lambda a: jnp.sin(a) * a, args=args, needs_devices=4, jit=True)


@registered
def sharded_explicit_two_axes() -> Case:
    mesh = mesh_of(2, 2)
    args = (spread(_rows(8, 4), mesh, "i", None), spread(matrix(4, 4), mesh, None, "j"))
    return Case(fn=lambda x, w: jnp.tanh(x @ w), args=args, needs_devices=4, saveable_args=(True, False))


@registered
def sharded_two_axes_in_one_dimension() -> Case:
    mesh = mesh_of(2, 2, kind=AxisType.Auto)
    args = (spread(_rows(), mesh, ("i", "j")),)
    return Case(fn=lambda a: jnp.sin(a) * a, args=args, needs_devices=4)


@registered
def sharded_replicated_leaf() -> Case:
    mesh = mesh_of(4, kind=AxisType.Auto)
    args = (spread(matrix(), mesh), spread(matrix(8, 4), mesh, "i"))
    return Case(fn=layer, args=args, needs_devices=4, jit=True)


@registered
def sharded_auto_mesh_weights_not_saveable() -> Case:
    mesh = mesh_of(4, kind=AxisType.Auto)
    args = (spread(matrix(), mesh, None, "i"), spread(matrix(8, 4), mesh))
    return Case(fn=layer, args=args, needs_devices=4, saveable_args=(False, True))


@registered
def sharded_keys() -> Case:
    mesh = mesh_of(4, kind=AxisType.Auto)
    keys = spread(jax.random.split(jax.random.key(4), 8), mesh, "i")

    @jax.checkpoint
    def noisy(x: Any, keys: Any) -> Any:
        return jnp.sin(x) * jax.vmap(jax.random.normal)(keys)

    return Case(fn=noisy, args=(spread(ramp(8), mesh, "i"), keys), needs_devices=4)


@registered
def sharded_over_two_of_four_devices() -> Case:
    mesh = jax.make_mesh((2,), ("i",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])
    args = (spread(matrix(), mesh), spread(_rows(8, 4), mesh, "i"))
    return Case(fn=layer, args=args, needs_devices=4, saveable_args=(False, True), on_some_devices=True)


@registered
def committed_to_other_device() -> Case:
    args = tuple(jax.device_put(one, jax.devices()[1]) for one in (matrix(), ramp()))
    return Case(fn=layer, args=args, needs_devices=4, saveable_args=(False, True))


@registered
def committed_to_pinned_host() -> Case:
    device = jax.sharding.SingleDeviceSharding(jax.devices()[0], memory_kind="pinned_host")
    x = jax.device_put(ramp(), device)

    def moved(x: Any) -> Any:
        x = jax.device_put(x, jax.memory.Space.Device)
        return jnp.sin(x) * x

    return Case(fn=moved, args=(x,), jit=True)


@registered
def pmap_vjp() -> Case:
    dense = jax.pmap(lambda w, x: jnp.tanh(x @ w), in_axes=(None, 0))
    return Case(fn=dense, args=(matrix(), matrix(4, 4, 0.2)), needs_devices=4)
