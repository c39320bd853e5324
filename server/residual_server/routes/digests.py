"""``/v1/digests``: which leaves a run holds, so that they need not be sent again."""

from __future__ import annotations

from typing import Any, Literal

from fastapi import APIRouter, Request

from residual_server.auth import check_access
from residual_server.body import receive_leaves
from residual_server.problems import PROBLEM
from residual_server.service import Service
from residual_store.key import check_run

__all__ = ["router"]

_LEAF: dict[str, Any] = {
    "type": "object",
    "required": ["digest", "dtype", "shape"],
    "additionalProperties": False,
    "properties": {
        "digest": {"type": "string", "pattern": "^[0-9a-f]{32}$"},
        "dtype": {"type": "string"},
        "shape": {"type": "array", "items": {"type": "integer", "minimum": 0}},
    },
}
_BODY: dict[str, Any] = {
    "requestBody": {
        "required": True,
        "content": {"application/json": {"schema": {"type": "array", "items": _LEAF}}},
    }
}


def router(service: Service) -> APIRouter:
    """The route that asks for leaves."""
    routes = APIRouter(tags=["bundles"], responses=PROBLEM)
    store = service.store

    @routes.post("/v1/digests", operation_id="askForLeaves", openapi_extra=_BODY)
    async def ask_for_leaves(
        run: str, request: Request, durability: Literal["host", "disk"] | None = None
    ) -> dict[str, list[bool]]:
        """Which of these leaves a bundle of the run with this durability can be put without, in the order asked.

        They stay for `dedup_seconds`; a put that comes later may be answered with 412, and then the whole bundle is to be sent.
        """
        check_access(service.grant(request), "write", check_run(run, store.settings))
        leaves = await receive_leaves(request, store.settings)
        held = await service.call(lambda: store.held(run, leaves, durability=durability))
        return {"held": list(held)}

    return routes
