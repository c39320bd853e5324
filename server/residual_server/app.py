"""The app: FastAPI in front of a local store, built by a function."""

from __future__ import annotations

import importlib.metadata

from fastapi import Depends, FastAPI

from residual_server.auth import Tokens
from residual_server.metrics import Metered, Metrics
from residual_server.problems import install
from residual_server.routes import (
    bundles,
    digests,
    leases,
    leaves,
    listings,
    manifests,
    programs,
    segments,
    state,
)
from residual_server.service import Service, refuse_unknown_parameters
from residual_store.engine.local import LocalStore
from residual_store.shared_arena import SharedArena

__all__ = ["create_app"]


def create_app(
    store: LocalStore, *, tokens: Tokens | None = None, arena: SharedArena | None = None
) -> FastAPI:
    """The ASGI app that serves ``store``; with ``tokens``, only to those who hold one.

    ``arena`` is the memory of the store, if clients on the same host can share it.

    ``app.state.service`` is the `Service`; set its ``stopping`` event to end long-polls before a stop.

    >>> from residual_store.settings import Settings
    >>> create_app(LocalStore.in_memory(settings=Settings())).title
    'Residual Store'
    """
    service = Service(store=store, tokens=tokens, arena=arena)
    metrics = Metrics(store)
    app = FastAPI(
        title="Residual Store",
        version=importlib.metadata.version("residual-store"),
        description="Residuals of JAX's VJP objects, off the accelerator and back.",
        license_info={"name": "Apache-2.0", "identifier": "Apache-2.0"},
        lifespan=service.lifespan,
        redirect_slashes=False,
        dependencies=[Depends(refuse_unknown_parameters)],
    )
    app.state.service = service
    app.add_middleware(Metered, metrics=metrics)
    install(app)
    # A key may hold slashes, so the longer paths come first.
    for module in (leaves, manifests, leases, bundles, digests, listings, programs, segments):
        app.include_router(module.router(service))
    app.include_router(state.router(service, metrics))
    return app
