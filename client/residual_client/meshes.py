"""Meshes: shardings in symbols, and the devices that stand for them in this process.

A manifest never holds device ids: it has the names, sizes and types of the axes and a partition spec.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec, Sharding

from residual_store.errors import MeshMismatch
from residual_store.leaf import MeshSharding

__all__ = ["Meshes", "moved", "named", "symbolic"]


def symbolic(sharding: Any, ndim: int) -> MeshSharding | None:
    """A named sharding in symbols; None for any other."""
    if not isinstance(sharding, NamedSharding):
        return None
    mesh = sharding.mesh
    return MeshSharding(
        axis_names=tuple(map(str, mesh.axis_names)),
        axis_sizes=tuple(mesh.axis_sizes),
        axis_types=tuple(str(kind).rpartition(".")[2] for kind in mesh.axis_types),
        spec=tuple(_axes(entry) for entry in (*sharding.spec, *[None] * (ndim - len(sharding.spec)))),
    )


def _axes(entry: Any) -> tuple[str, ...]:
    if entry is None:
        return ()
    return tuple(map(str, entry)) if isinstance(entry, tuple) else (str(entry),)


def named(shardings: Iterable[MeshSharding | None]) -> str:
    """The meshes of these shardings in words, each once.

    >>> named([None])
    'no mesh'
    """
    axes = [dict(zip(one.axis_names, one.axis_sizes, strict=True)) for one in shardings if one is not None]
    texts = [f"mesh({', '.join(f'{name}={size}' for name, size in one.items())})" for one in axes]
    return " and ".join(dict.fromkeys(texts)) or "no mesh"


class Meshes:
    """The meshes and devices that this process offers: those of live arrays first, then one made of its devices.

    >>> count = jax.device_count()
    >>> recorded = MeshSharding(axis_names=("i",), axis_sizes=(count,), axis_types=("Auto",), spec=(("i",),))
    >>> Meshes([]).sharding(recorded, "h").num_devices == count
    True
    """

    def __init__(self, live: Iterable[Any]) -> None:
        arrays = [
            value for value in live if isinstance(value, jax.Array) and not isinstance(value, jax.core.Tracer)
        ]
        named = [array.sharding for array in arrays if isinstance(array.sharding, NamedSharding)]
        self._known: list[Mesh] = [one.mesh for one in named if isinstance(one.mesh, Mesh)]
        committed = [array for array in arrays if array.committed and len(array.devices()) == 1]
        self._device = min(committed[0].devices(), key=str) if committed else None

    @property
    def device(self) -> jax.Device:
        """Where a leaf goes that was committed to one device: to that of the live arrays, else to the first one."""
        return self._device or jax.local_devices()[0]

    def sharding(self, recorded: MeshSharding, path: str, *, memory_kind: str | None = None) -> Sharding:
        """The recorded sharding on this process's devices; raises `MeshMismatch`, which names both meshes."""
        spec = PartitionSpec(*[names[0] if len(names) == 1 else names or None for names in recorded.spec])
        return NamedSharding(self._mesh(recorded, path), spec, memory_kind=memory_kind)

    def found(self, recorded: MeshSharding) -> Mesh | None:
        """A mesh with these axes, if a live array is on one."""
        return next((mesh for mesh in self._known if _same(mesh, recorded)), None)

    def _mesh(self, recorded: MeshSharding, path: str) -> Mesh:
        if (mesh := self.found(recorded)) is not None:
            return mesh
        count = math.prod(recorded.axis_sizes)
        if count != len(jax.devices()):
            raise MeshMismatch(
                f"{path} was made on {recorded}, which has {count} devices, and this process has "
                f"{len(jax.devices())} ({jax.devices()[0].platform}) and no argument on such a mesh; "
                "use it where there are as many devices, or call restore with args or like that lie on the mesh to use",
                leaf=path,
            )
        mesh = jax.make_mesh(
            recorded.axis_sizes,
            recorded.axis_names,
            axis_types=tuple(AxisType[kind] for kind in recorded.axis_types),
        )
        self._known.append(mesh)
        return mesh


def _same(mesh: Mesh, recorded: MeshSharding) -> bool:
    return (
        tuple(map(str, mesh.axis_names)) == recorded.axis_names
        and tuple(mesh.axis_sizes) == recorded.axis_sizes
        and tuple(str(kind).rpartition(".")[2] for kind in mesh.axis_types) == recorded.axis_types
    )


def moved(arrays: Sequence[Any], *, live: Iterable[Any]) -> list[Any]:
    """The same arrays on the meshes of the ``live`` ones: with the same axes, and maybe with the devices in another order."""
    meshes = Meshes(live)
    return [_moved(array, meshes) for array in arrays]


def _moved(array: Any, meshes: Meshes) -> Any:
    sharding = getattr(array, "sharding", None)
    recorded = symbolic(sharding, np.ndim(array))
    mesh = meshes.found(recorded) if recorded is not None else None
    if mesh is None or not isinstance(sharding, NamedSharding) or mesh == sharding.mesh:
        return array
    return jax.device_put(array, NamedSharding(mesh, sharding.spec, memory_kind=sharding.memory_kind))
