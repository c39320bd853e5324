"""The passage of one traced array to the host and back: what a host call can carry, and what the array was."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from residual_client.jax_compat import key_impl, with_weak_type
from residual_client.transfer import check_precision
from residual_store.errors import LeafUnavailable

__all__ = ["Passage"]

_NOTHING = np.zeros(0, np.bool_)
"""What travels for an array of float0, which has a shape and no bytes."""

_UNKNOWN_TO_XLA = ("float6_e2m3fn", "float6_e3m2fn")


@dataclass(frozen=True)
class Passage:
    """An array of the abstract value ``aval``, which travels with the shape and dtype ``host``.

    >>> passage = Passage.of(jax.typeof(jnp.ones(3)), "h")
    >>> passage.back(passage.out(jnp.ones(3)))
    Array([1., 1., 1.], dtype=float32)
    """

    aval: Any
    host: jax.ShapeDtypeStruct

    @classmethod
    def of(cls, aval: Any, path: str) -> Passage:
        """The passage of arrays with this abstract value; raises errors that name ``path``.

        `LeafUnavailable` for a dtype that no host function can take, and `PrecisionMismatch` for one of 64 bits where
        JAX has these off.
        """
        if str(aval.dtype) in _UNKNOWN_TO_XLA:
            raise LeafUnavailable(
                f"{path} is {aval.dtype}, which XLA hands to no host function; keep it in another dtype",
                leaf=path,
            )
        check_precision([(path, str(aval.dtype))])
        if aval.dtype == jax.dtypes.float0:
            return cls(aval, jax.ShapeDtypeStruct(_NOTHING.shape, _NOTHING.dtype))
        return cls(aval, jax.eval_shape(_out, jax.ShapeDtypeStruct(aval.shape, aval.dtype)))

    def out(self, array: Any) -> jax.Array:
        """The array as it travels."""
        return _out(array)

    def back(self, host: jax.Array) -> Any:
        """The array as it was, of the same weak type, sharding and variation over a mesh; raises `PrecisionMismatch`."""
        if self.aval.dtype == jax.dtypes.float0:
            return np.zeros(self.aval.shape, jax.dtypes.float0)
        check_precision([("a residual", str(self.host.dtype))])
        array = host
        if jnp.issubdtype(self.aval.dtype, jax.dtypes.prng_key):
            array = jax.random.wrap_key_data(host, impl=key_impl(self.aval.dtype))
        return _of_type(array, self.aval)


def _out(array: Any) -> jax.Array:
    if array.dtype == jax.dtypes.float0:
        return jnp.asarray(_NOTHING)
    return jax.random.key_data(array) if jnp.issubdtype(array.dtype, jax.dtypes.prng_key) else array


def _of_type(array: jax.Array, aval: Any) -> jax.Array:
    """The same values with the weak type, the explicit sharding and the variation over manual mesh axes of ``aval``."""
    if aval.weak_type:
        array = with_weak_type(array, True)
    if varying := tuple(aval.manual_axis_type.varying):
        array = jax.lax.pcast(array, varying, to="varying")
    if any(axis is not None for axis in aval.sharding.spec):
        array = jax.sharding.reshard(array, aval.sharding)
    return array
