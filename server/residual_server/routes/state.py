"""The state of the service: what it can do, how full it is, and whether it lives."""

from __future__ import annotations

import importlib.metadata
from dataclasses import asdict, replace
from typing import Any

from fastapi import APIRouter, Request, Response

from residual_server.auth import check_access
from residual_server.metrics import Metrics
from residual_server.problems import PROBLEM
from residual_server.service import Service
from residual_store.errors import Stopping
from residual_store.manifest import FORMAT
from residual_store.store import Usage

__all__ = ["router"]


def router(service: Service, metrics: Metrics) -> APIRouter:
    """The routes of the service itself."""
    routes = APIRouter(tags=["service"], responses=PROBLEM)
    store = service.store

    @routes.get("/v1/capabilities", operation_id="getCapabilities")
    @routes.head("/v1/capabilities", include_in_schema=False)
    async def capabilities(request: Request) -> dict[str, Any]:
        """Release, format version, tiers, limits and shared memory of this server.

        Who can read `nonce` in the file of that name in the arena's directory is on the same host, and the same user.
        """
        service.grant(request)
        arena = service.arena
        return {
            "release": importlib.metadata.version("residual-store"),
            "format": FORMAT,
            "durabilities": ["host", "disk"] if store.has_durable_tier else ["host"],
            "transports": ["http"] if arena is None else ["segment", "http"],
            "arena": None
            if arena is None
            else {"directory": str(arena.directory), "nonce": arena.nonce.hex()},
            "limits": asdict(store.settings),
        }

    @routes.get("/v1/usage", operation_id="getUsage")
    @routes.head("/v1/usage", include_in_schema=False)
    async def usage(request: Request) -> Usage:
        """Bundles and bytes by run and tier, of the runs that the token reaches."""
        grant = service.grant(request)
        found = await service.call(store.usage)
        return replace(found, runs=tuple(run for run in found.runs if grant.reaches(run.run)))

    @routes.get("/healthz", operation_id="getHealth")
    @routes.head("/healthz", include_in_schema=False)
    async def healthz() -> dict[str, str]:
        """Whether the process answers at all."""
        return {"status": "alive"}

    @routes.get("/readyz", operation_id="getReadiness")
    @routes.head("/readyz", include_in_schema=False)
    async def readyz() -> dict[str, str]:
        """Whether the server takes work; 503 while it stops."""
        if service.stopping.is_set():
            raise Stopping("the server is stopping")
        return {"status": "ready"}

    @routes.get(
        "/metrics",
        operation_id="getMetrics",
        response_class=Response,
        responses={200: {"content": {"text/plain": {}}}},
    )
    @routes.head("/metrics", include_in_schema=False)
    async def get_metrics(request: Request) -> Response:
        """Counters and gauges in the Prometheus text format; needs the access admin."""
        check_access(service.grant(request), "admin")
        text, media_type = await service.call(metrics.render)
        return Response(text, media_type=media_type)

    return routes
