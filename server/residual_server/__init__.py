"""Residual Store over HTTP: FastAPI in front of the engine. Imports no jax.

>>> from residual_server import create_app
"""

from residual_store.errors import MissingExtra

try:
    import fastapi as _fastapi
    import prometheus_client as _prometheus_client
    import uvicorn as _uvicorn
except ModuleNotFoundError as error:
    raise MissingExtra.of("server", part="residual_server", missing=error.name) from error

from residual_server.app import create_app
from residual_server.auth import Tokens
from residual_server.serve import serve

del _fastapi, _prometheus_client, _uvicorn

__all__ = ["Tokens", "create_app", "serve"]
