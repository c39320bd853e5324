"""Dependence: whether a backward pass needs the value of the primal, or only where it lies."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from jax.tree_util import tree_leaves

from residual_client.jax_compat import inputs_read

__all__ = ["cotangent_depends_on_primal"]

_VALUE_WANTED = (
    jax.errors.ConcretizationTypeError,
    jax.errors.NonConcreteBooleanIndexError,
    jax.errors.TracerArrayConversionError,
    jax.errors.TracerIntegerConversionError,
)


def cotangent_depends_on_primal(g: Callable[[Any], Any], y: Any) -> bool:
    """Whether the VJP of ``g`` saves anything that depends on the values in ``y``, a pytree of arrays or abstract values.

    Where it does not, the cotangent of ``y`` is known before ``y`` is.
    Constants do not count, nor does what follows from shapes and dtypes.
    In doubt it is true: an operation that merely could use ``y`` counts, and so does a ``g`` that cannot be traced without
    its values.

    >>> weights = jnp.arange(3.0)
    >>> cotangent_depends_on_primal(lambda y: y @ weights + 1, jnp.ones(3))
    False
    >>> cotangent_depends_on_primal(lambda y: jnp.sin(y @ weights), jnp.ones(3))
    True
    """

    def residuals(y: Any) -> list[Any]:
        return tree_leaves(jax.vjp(g, y)[1])

    try:
        traced = jax.make_jaxpr(residuals)(y)
    except _VALUE_WANTED:
        return True
    return any(inputs_read(traced))
