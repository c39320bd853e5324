"""Host calls: a JAX primitive that hands arrays to a numpy function on the host and brings its results back."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any, Protocol, Self

import jax
import numpy as np
import numpy.typing as npt
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from residual_client.jax_compat import emit_host_call, impure, is_over_several_devices

__all__ = ["Host", "HostFunction", "host_call"]

_logger = logging.getLogger(__name__)

type Host = npt.NDArray[Any]


class HostFunction(Protocol):
    """A numpy function with the abstract arrays that it returns; equal ones share a compilation.

    It must not call JAX, which can wait for the very thread that it runs on.
    """

    @property
    def results(self) -> Sequence[jax.ShapeDtypeStruct]:
        """Shape and dtype of each result."""

    def batched(self, size: int) -> Self:
        """The same for operands and results with a leading axis of ``size``; an operand that has no batch has 1 there."""

    def __call__(self, *operands: Host) -> Sequence[Host]: ...


def host_call(function: HostFunction, *operands: jax.Array) -> list[jax.Array]:
    """The results of ``function``, called once for every execution, in no order but that of the data.

    Under `jax.vmap` it is called once for the whole batch.
    Raises TypeError when it is differentiated.
    """
    results: list[jax.Array] = _host_call_p.bind(*operands, function=function)
    # Over several devices XLA cannot partition what uses two or more results of a host call directly.
    return list(jax.lax.optimization_barrier(results)) if len(results) > 1 else results


_host_call_p = Primitive("residual_host_call")
_host_call_p.multiple_results = True


def _results(*operands: Any, function: HostFunction) -> list[Any]:
    return [jax.core.ShapedArray(result.shape, result.dtype) for result in function.results]


def _jvp(*_: Any, **__: Any) -> Any:
    raise TypeError(
        "a function under client.offloaded can be differentiated once and in reverse mode only: what is in the store "
        "has no tangent, so a second derivative would be wrong; take the inner derivative of the plain function"
    )


def _batched(
    operands: Sequence[Any], axes: Sequence[int | None], *, function: HostFunction
) -> tuple[list[jax.Array], list[int]]:
    (size,) = {operand.shape[axis] for operand, axis in zip(operands, axes, strict=True) if axis is not None}
    moved = [
        jax.numpy.expand_dims(operand, 0) if axis is None else jax.numpy.moveaxis(operand, axis, 0)
        for operand, axis in zip(operands, axes, strict=True)
    ]
    results = host_call(function.batched(size), *moved)
    return results, [0] * len(results)


def _called(*operands: Any, function: HostFunction) -> list[jax.Array]:
    # A copy, because the results may lie in the memory of a store.
    return [jax.device_put(np.array(result, order="C")) for result in function(*map(np.asarray, operands))]


def _lowered(ctx: Any, *operands: Any, function: HostFunction) -> Sequence[Any]:
    called = _telling(function) if is_over_several_devices(ctx) else function
    return emit_host_call(ctx, lambda *arrays: tuple(called(*map(np.asarray, arrays))), operands)


def _telling(function: HostFunction) -> Callable[..., Sequence[Host]]:
    """The function, whose failures are logged at once.

    The other devices may wait for the one that has failed, and then JAX never raises: XLA ends the process, or hangs.
    """

    def called(*operands: Host) -> Sequence[Host]:
        try:
            return function(*operands)
        except Exception as error:
            _logger.error("%s: %s", type(error).__name__, error)
            raise

    return called


impure(_host_call_p, _results)
_host_call_p.def_impl(_called)
ad.primitive_jvps[_host_call_p] = _jvp
batching.primitive_batchers[_host_call_p] = _batched
mlir.register_lowering(_host_call_p, _lowered, cacheable=False)
