"""``/v1/bundles/{key}/manifest``: everything about a bundle but its leaves."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse

from residual_server.problems import PROBLEM
from residual_server.service import Service
from residual_store.manifest import encode
from residual_store.manifest_json import as_json

__all__ = ["router"]

_MSGPACK = "application/msgpack"


def router(service: Service) -> APIRouter:
    """The routes of manifests."""
    routes = APIRouter(tags=["manifests"], responses=PROBLEM)
    store = service.store

    @routes.get(
        "/v1/bundles/{key:path}/manifest",
        operation_id="getManifest",
        response_class=Response,
        responses={200: {"content": {"application/json": {}, _MSGPACK: {}}}},
    )
    @routes.head("/v1/bundles/{key:path}/manifest", include_in_schema=False)
    async def get_manifest(key: str, request: Request) -> Response:
        """The manifest of a bundle: JSON, or msgpack with `Accept: application/msgpack`."""
        service.check_key(request, key, "read")
        manifest = await service.call(lambda: store.manifest(key))
        if _MSGPACK in request.headers.get("accept", ""):
            return Response(encode(manifest), media_type=_MSGPACK)
        return JSONResponse(as_json(manifest))

    return routes
