"""``/v1/programs/{fingerprint}``: exported backward passes. The server stores them and never runs them."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Path, Request, Response

from residual_server.auth import check_access
from residual_server.body import receive_program
from residual_server.problems import PROBLEM
from residual_server.service import Service
from residual_store.bundle import digest_of
from residual_store.errors import InvalidFrame

__all__ = ["router"]

_BINARY: dict[str, Any] = {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}}
_DIGEST = "Residual-Digest"

type Fingerprint = Annotated[str, Path(pattern="^[0-9a-f]{64}$")]


def router(service: Service) -> APIRouter:
    """The routes of programs."""
    routes = APIRouter(tags=["programs"], responses=PROBLEM)

    @routes.put(
        "/v1/programs/{fingerprint}",
        operation_id="putProgram",
        status_code=204,
        openapi_extra={"requestBody": {"required": True, "content": _BINARY}},
    )
    async def put_program(fingerprint: Fingerprint, request: Request) -> None:
        """Store an exported backward; the first one under a fingerprint stays."""
        check_access(service.grant(request), "write")
        program = await receive_program(request, service.store.settings)
        if request.headers.get(_DIGEST, digest_of(program).hex()) != digest_of(program).hex():
            raise InvalidFrame(f"the program does not match its {_DIGEST}")
        await service.call(lambda: service.store.put_program(fingerprint, program))

    @routes.get(
        "/v1/programs/{fingerprint}",
        operation_id="getProgram",
        response_class=Response,
        responses={200: {"content": _BINARY}},
    )
    @routes.head("/v1/programs/{fingerprint}", include_in_schema=False)
    async def get_program(fingerprint: Fingerprint, request: Request) -> Response:
        """The exported backward with this fingerprint."""
        service.grant(request)
        program = await service.call(lambda: service.store.get_program(fingerprint))
        digest = digest_of(program).hex()
        headers = {_DIGEST: digest, "ETag": f'"{digest}"'}
        return Response(program, headers=headers, media_type="application/octet-stream")

    return routes
