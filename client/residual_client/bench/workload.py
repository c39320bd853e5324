"""Workloads: the arrays that are put and got."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from residual_client.bench.block import block_vjp, residual_arrays
from residual_store.errors import DataLoss
from residual_store.frame import aligned_empty
from residual_store.layout import ALIGNMENT

__all__ = ["NAMES", "Host", "Workload", "workload"]

type Host = npt.NDArray[np.generic]


@dataclass(frozen=True, kw_only=True, eq=False)
class Workload:
    """Named host arrays, which lie one behind the other in ``flat`` (uint8), each 64-byte aligned.

    A limit copies, sends or writes ``flat`` in one piece; it is ``nbytes`` long, up to 63 bytes a leaf more than the
    arrays together.
    ``vjp`` is the VJP object whose residuals they are, if they are.
    """

    name: str
    flat: npt.NDArray[np.uint8]
    arrays: Mapping[str, Host]
    vjp: Any = None

    @property
    def nbytes(self) -> int:
        return self.flat.nbytes

    @classmethod
    def of(cls, name: str, hosts: Sequence[Host], *, vjp: Any = None) -> Self:
        """A workload with copies of these arrays."""
        offsets = np.cumsum([0, *(-(-host.nbytes // ALIGNMENT) * ALIGNMENT for host in hosts)])
        flat = aligned_empty(int(offsets[-1]))
        flat[:] = 0
        arrays = {}
        for index, (host, offset) in enumerate(zip(hosts, offsets, strict=False)):
            place = flat[offset : offset + host.nbytes].view(host.dtype).reshape(host.shape)
            place[...] = host
            arrays[f"leaf-{index}"] = place
        return cls(name=name, flat=flat, arrays=arrays, vjp=vjp)

    def check(self, hosts: Sequence[Host]) -> None:
        """Raise `DataLoss` unless these are the arrays, bit by bit."""
        for (name, array), host in zip(self.arrays.items(), hosts, strict=True):
            if host.tobytes() != array.tobytes():
                raise DataLoss(f"{name} of the workload {self.name} came back with other bits", leaf=name)


def workload(name: str, *, quick: bool) -> Workload:
    """One of `NAMES`; a quick one of ``block`` and ``leaf`` is smaller."""
    return _MAKERS[name](quick)


def _block(quick: bool) -> Workload:
    vjp = block_vjp(batch=1 if quick else 4, length=128 if quick else 512)
    return Workload.of("block", residual_arrays(vjp), vjp=vjp)


def _leaf(quick: bool) -> Workload:
    return Workload.of("leaf", _random(1, (8 if quick else 256) << 20))


def _small(_: bool) -> Workload:
    return Workload.of("small", _random(1000, 4096))


def _tiny(_: bool) -> Workload:
    return Workload.of("tiny", _random(8, 1024))


def _random(count: int, nbytes: int) -> list[Host]:
    """That many arrays of float32, in which no encoding finds anything to save."""
    random = np.random.default_rng(0)
    return [random.random(nbytes // 4, np.float32) for _ in range(count)]


_MAKERS: Mapping[str, Callable[[bool], Workload]] = {
    "block": _block,
    "leaf": _leaf,
    "small": _small,
    "tiny": _tiny,
}

NAMES = tuple(_MAKERS)
"""The workloads in the order in which they are measured."""
