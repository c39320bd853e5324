"""``/v1/bundles/{key}/touch`` and ``/prefetch``: how long a bundle stays, and where."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query, Request

from residual_server.problems import PROBLEM
from residual_server.service import Service
from residual_store.store import Stat

__all__ = ["router"]


def router(service: Service) -> APIRouter:
    """The routes that change a bundle's lease or tier."""
    routes = APIRouter(tags=["bundles"], responses=PROBLEM)
    store = service.store

    @routes.post("/v1/bundles/{key:path}/touch", operation_id="touchBundle")
    async def touch(key: str, request: Request, ttl: Annotated[float | None, Query(gt=0)] = None) -> Stat:
        """Start the lease anew: `ttl` seconds from now, or without end."""
        service.check_key(request, key, "write")
        return await service.call(lambda: store.touch(key, ttl=ttl))

    @routes.post("/v1/bundles/{key:path}/prefetch", operation_id="prefetchBundle")
    async def prefetch(key: str, request: Request) -> Stat:
        """Bring a durable bundle to the host tier as well."""
        service.check_key(request, key, "read")
        return await service.call(lambda: store.prefetch(key))

    return routes
