"""Every way that JAX offers to have an array's memory overwritten, or to hand it to somebody who could."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import io_callback

__all__ = ["ON_ONE_DEVICE", "WAYS"]

type Way = Callable[[jax.Array], Any]


def _donated(fn: Callable[[Any], Any]) -> Way:
    """The function under jit with its argument donated, so that XLA may put the result where the argument was."""
    return jax.jit(fn, donate_argnums=0)


def _compiled_ahead(x: jax.Array) -> Any:
    return jax.jit(lambda x: x * 0, donate_argnums=0).lower(x).compile()(x)


def _put_donated(x: jax.Array) -> Any:
    return _donated(lambda x: x * 0)(jax.device_put(x, x.sharding, donate=True))


def _through_a_ref(x: jax.Array) -> Any:
    ref = jax.new_ref(x)
    ref[...] = jnp.zeros_like(x)
    return jax.freeze(ref)


def _through_dlpack(x: jax.Array) -> Any:
    return _donated(lambda x: x * 0)(jax.dlpack.from_dlpack(x))


def _written(host: np.ndarray) -> None:
    """Overwrite a host array, by force if need be; numpy refuses, because JAX exports its arrays as read-only."""
    try:
        host.flags.writeable = True
    except ValueError:
        return
    host[...] = 0


def _in_a_callback(x: jax.Array) -> Any:
    return jax.jit(lambda x: io_callback(lambda y: _written(np.asarray(y)), None, x), donate_argnums=0)(x)


WAYS: Mapping[str, Way] = {
    "arithmetic": _donated(lambda x: x * 0),
    "at_set": _donated(lambda x: x.at[...].set(0)),
    "update_slice": _donated(lambda x: jax.lax.dynamic_update_slice(x, x[:1] * 0, (0,) * x.ndim)),
    "loop": _donated(lambda x: jax.lax.fori_loop(0, 3, lambda i, c: c.at[i].set(0), x)),
    "scan": _donated(lambda x: jax.lax.scan(lambda c, _: (c.at[0].add(1), None), x, None, length=3)[0]),
    "sort": _donated(lambda x: -jnp.sort(-x, axis=0)),
    "identity_then_arithmetic": lambda x: _donated(lambda x: x * 0)(_donated(lambda x: x)(x)),
    "alias_then_arithmetic": lambda x: _donated(lambda x: x * 0)(jax.device_put(x, may_alias=True)),
    "asarray_then_arithmetic": lambda x: _donated(lambda x: x * 0)(jnp.asarray(x)),
    "compiled_ahead": _compiled_ahead,
    "eager_at_set": lambda x: x.at[...].set(0),
    "device_put_donated": _put_donated,
    "ref": _through_a_ref,
    "dlpack_to_jax": _through_dlpack,
    "dlpack_to_numpy": lambda x: _written(np.from_dlpack(x)),
    "numpy": lambda x: _written(np.asarray(x)),
    "buffer": lambda x: _written(np.frombuffer(memoryview(x), np.uint8)),
    "callback": _in_a_callback,
}
"""By name; each takes an array of float32 or int32 with at least 3 rows."""

ON_ONE_DEVICE = frozenset({"dlpack_to_jax", "dlpack_to_numpy", "buffer"})
"""What JAX offers for arrays on one device only."""
