"""``/v1/segments``: shared memory for clients on the same host, which fill it before they put."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Path, Query, Request

from residual_server.problems import PROBLEM
from residual_server.service import Service
from residual_store.place import Place

__all__ = ["Ticket", "router"]

type Ticket = Annotated[str, Path(pattern="^[0-9a-f]{32}$")]


def router(service: Service) -> APIRouter:
    """The routes that lend segments."""
    routes = APIRouter(tags=["segments"], responses=PROBLEM)
    admission = service.store.admission

    @routes.post("/v1/segments", operation_id="lendSegment", status_code=201)
    async def lend_segment(
        key: str,
        request: Request,
        nbytes: Annotated[int, Query(gt=0, description="Length of the leaf area in bytes.")],
    ) -> Place:
        """Lend a segment for the put of a key; 410 if there is none, and the bytes can travel in the body."""
        service.check_key(request, key, "write")
        return await service.call(lambda: admission.lend(key, nbytes))

    @routes.delete("/v1/segments/{ticket}", operation_id="returnSegment", status_code=204)
    async def return_segment(ticket: Ticket, key: str, request: Request) -> None:
        """Give a lent segment back without a put."""
        service.check_key(request, key, "write")
        admission.give_back(key, ticket)

    return routes
