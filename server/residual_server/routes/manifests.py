"""``/v1/bundles/{key}/manifest``: everything about a bundle but its leaves."""

from __future__ import annotations

import re

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse

from residual_server.problems import PROBLEM
from residual_server.service import Service
from residual_store.manifest import encode
from residual_store.manifest_json import as_json

__all__ = ["router"]

_MSGPACK = "application/msgpack"
_WEIGHT = re.compile(r"\bq\s*=\s*([01](?:\.[0-9]{0,3})?)(?![0-9.])", re.ASCII)


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
        varies = {"Vary": "Accept"}
        if _is_preferred(_MSGPACK, "application/json", request.headers.get("accept", "")):
            return Response(encode(manifest), media_type=_MSGPACK, headers=varies)
        return JSONResponse(as_json(manifest), headers=varies)

    return routes


def _is_preferred(kind: str, other: str, accept: str) -> bool:
    """Whether a media type is asked for by its name, and the other one no more than that.

    >>> _is_preferred("a/b", "a/c", "A/B; q=0.5, a/c;q=0.1"), _is_preferred("a/b", "a/c", "*/*")
    (True, False)
    """
    weights = {}
    for entry in accept.lower().split(","):
        name, _, parameters = entry.partition(";")
        found = _WEIGHT.search(parameters)
        weights[name.strip()] = float(found[1]) if found else 1.0
    return 0.0 < weights.get(kind, 0.0) >= weights.get(other, 0.0)
