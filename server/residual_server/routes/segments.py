"""``/v1/segments``: shared memory for clients on the same host, which fill it before they put."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query, Request

from residual_server.problems import PROBLEM
from residual_server.service import Service

__all__ = ["router"]


def router(service: Service) -> APIRouter:
    """The route that makes segments ready."""
    routes = APIRouter(tags=["segments"], responses=PROBLEM)
    admission = service.store.admission

    @routes.post("/v1/segments", operation_id="prepareSegment", status_code=204)
    async def prepare_segment(
        key: str,
        request: Request,
        nbytes: Annotated[int, Query(gt=0, description="Length of the leaf area in bytes.")],
    ) -> None:
        """Have an idle segment for the put of a key; 410 if there is none, and the bytes can travel in the body."""
        service.check_key(request, key, "write")
        await service.call(lambda: admission.prepare(key, nbytes))

    return routes
