"""``/v1/bundles``: pages of bundles, and dropping all under a prefix."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query, Request

from residual_server.problems import PROBLEM
from residual_server.service import Service
from residual_store.store import Page

__all__ = ["router"]


def router(service: Service) -> APIRouter:
    """The routes over many bundles."""
    routes = APIRouter(tags=["bundles"], responses=PROBLEM)
    store = service.store

    @routes.get("/v1/bundles", operation_id="listBundles")
    @routes.head("/v1/bundles", include_in_schema=False)
    async def list_bundles(
        request: Request, prefix: str = "", after: str = "", limit: Annotated[int, Query(ge=1)] = 100
    ) -> Page:
        """One page of bundles in key order; pass `next` as `after` for the following one."""
        service.check_prefix(request, prefix, "read")
        return await service.call(lambda: store.list(prefix=prefix, after=after, limit=limit))

    @routes.delete("/v1/bundles", operation_id="deleteBundles")
    async def delete_bundles(request: Request, prefix: str) -> dict[str, int]:
        """Delete all bundles under a prefix; `run/` drops a whole run."""
        service.check_prefix(request, prefix, "write")
        return {"deleted": await service.call(lambda: store.delete_prefix(prefix))}

    return routes
