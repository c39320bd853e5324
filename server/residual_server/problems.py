"""Errors as ``application/problem+json`` (RFC 9457), with the code of the error table and never with a payload."""

from __future__ import annotations

import json
import logging
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.routing import Match

from residual_store.errors import (
    ERRORS,
    InternalError,
    InvalidOption,
    MethodNotAllowed,
    NotFound,
    ResidualStoreError,
    Stopping,
)
from residual_store.problem import MEDIA_TYPE, problem_of

__all__ = ["PROBLEM", "install"]

log = logging.getLogger("residual_server")

PROBLEM: dict[int | str, dict[str, Any]] = {
    "default": {
        "description": "Refused or failed; `code` is one of the error table.",
        "content": {
            MEDIA_TYPE: {
                "schema": {
                    "type": "object",
                    "required": ["type", "title", "status", "code", "detail"],
                    "properties": {
                        "type": {"type": "string"},
                        "title": {"type": "string"},
                        "status": {"type": "integer"},
                        "code": {"type": "string", "enum": sorted(ERRORS)},
                        "detail": {"type": "string"},
                    },
                }
            }
        },
    }
}
"""The ``responses`` entry of every route."""


def install(app: FastAPI) -> None:
    """Answer every error of ``app`` as a problem."""
    app.add_exception_handler(ResidualStoreError, _refused)
    app.add_exception_handler(RequestValidationError, _invalid)
    app.add_exception_handler(HTTPException, _unrouted)
    app.add_exception_handler(ClientDisconnect, _gone)
    app.add_exception_handler(Exception, _failed)


def _answer(request: Request, error: ResidualStoreError, headers: dict[str, str] | None = None) -> Response:
    headers = dict(headers or {})
    if "retry_after" in error.fields:
        headers["Retry-After"] = str(max(1, round(float(error.fields["retry_after"] or 0))))
    if request.method == "HEAD":
        headers["Residual-Problem"] = json.dumps(problem_of(error))
    if error.code == "range-not-satisfiable":
        headers["Content-Range"] = f"bytes */{error.fields['length']}"
    if error.code == "unauthorized":
        headers["WWW-Authenticate"] = "Bearer"
    if error.code in {"upload-stalled", "too-large"}:
        # The rest of the body is not worth waiting for.
        headers["Connection"] = "close"
    return JSONResponse(
        problem_of(error),
        status_code=error.status or 500,
        headers=headers,
        media_type=MEDIA_TYPE,
    )


def _refused(request: Request, error: Exception) -> Response:
    assert isinstance(error, ResidualStoreError)
    if (error.status or 500) >= 500 and not isinstance(error, Stopping):
        log.warning(
            "%s %s: %s: %s", request.method, request.url.path, error.code, error.detail, exc_info=error
        )
    return _answer(request, error)


def _invalid(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    # pydantic's own report echoes the input; say only where and what.
    first = error.errors()[0]
    where = ".".join(str(part) for part in first["loc"][1:]) or str(first["loc"][0])
    return _answer(request, InvalidOption(f"{where}: {first['msg']}", option=where))


def _unrouted(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    if error.status_code == 405:
        methods = _methods(request)
        error.headers = {"Allow": ", ".join(methods)}
        refusal: ResidualStoreError = MethodNotAllowed(
            f"this route has no method {request.method}; it has {', '.join(methods)}"
        )
    elif error.status_code == 404:
        refusal = NotFound("there is no such route; GET /openapi.json lists them")
    else:
        refusal = InvalidOption(str(error.detail))
    return _answer(request, refusal, dict(error.headers or {}))


def _methods(request: Request) -> list[str]:
    """All methods that a path has, each of which may be a route of its own."""

    def is_there(method: str) -> bool:
        scope = {**request.scope, "method": method}
        return any(route.matches(scope)[0] is Match.FULL for route in request.app.routes)

    return list(filter(is_there, ("DELETE", "GET", "HEAD", "POST", "PUT")))


def _gone(request: Request, error: Exception) -> Response:
    log.info("%s %s: the client went away", request.method, request.url.path)
    return Response(status_code=400)


def _failed(request: Request, error: Exception) -> Response:
    return _answer(request, InternalError("the server failed; its log has the cause"))
