"""Residual Store for JAX: offload the residuals of a VJP object, and restore it for the backward pass.

>>> import residual_client as rc
>>> client = rc.connect("memory://")
>>> y, f_vjp = jax.vjp(jnp.sin, jnp.arange(3.0))
>>> handle = client.offload(f_vjp)
>>> client.restore(handle)(jnp.ones(3))
(Array([ 1.        ,  0.5403023 , -0.41614684], dtype=float32),)
"""

from residual_store.errors import MissingExtra

try:
    import flatbuffers as _flatbuffers
    import jax as _jax
except ModuleNotFoundError as error:
    raise MissingExtra.of("client", part="residual_client", missing=error.name) from error

from residual_client.adjoint import EagerAdjoint, eager_adjoint
from residual_client.adjoint_requests import serve_adjoints
from residual_client.backward import Backward
from residual_client.client import Client
from residual_client.connection import connect
from residual_client.dependence import cotangent_depends_on_primal
from residual_client.explain import explain
from residual_client.explanation import Explanation
from residual_client.handle import Handle
from residual_client.program_cache import EagerForwardWarning
from residual_client.progress import ProgressBar
from residual_client.transforms import Offloaded
from residual_store import errors
from residual_store.settings import Settings
from residual_store.store import Receipt

del _flatbuffers, _jax

__all__ = [
    "Backward",
    "Client",
    "EagerAdjoint",
    "EagerForwardWarning",
    "Explanation",
    "Handle",
    "Offloaded",
    "ProgressBar",
    "Receipt",
    "Settings",
    "connect",
    "cotangent_depends_on_primal",
    "eager_adjoint",
    "errors",
    "explain",
    "serve_adjoints",
]
