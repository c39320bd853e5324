"""``/v1/bundles/{key}/leaves/{index}``: one leaf, for clients that have no Python."""

from __future__ import annotations

import io
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Self

import numpy as np
from fastapi import APIRouter, Query, Request, Response

from residual_server.parts_response import PartsResponse
from residual_server.problems import PROBLEM
from residual_server.service import Service
from residual_store.bundle import digest_of
from residual_store.dtypes import NUMPY_NAMES, name_of
from residual_store.errors import InvalidOption, NotAcceptable, RangeNotSatisfiable

__all__ = ["router"]

_BINARY: dict[str, Any] = {"schema": {"type": "string", "format": "binary"}}
_CONTENT: dict[str, Any] = {"application/octet-stream": _BINARY, "application/x-npy": _BINARY}
_SLICE = re.compile(r"(-?\d{1,18})?(:(-?\d{1,18})?)?", re.ASCII)
_RANGE = re.compile(r"bytes=(\d{0,19})-(\d{0,19})", re.ASCII)


def router(service: Service) -> APIRouter:
    """The routes of single leaves."""
    routes = APIRouter(tags=["leaves"], responses=PROBLEM)

    @routes.get(
        "/v1/bundles/{key:path}/leaves/{index}",
        operation_id="getLeaf",
        response_class=Response,
        responses={
            200: {"content": _CONTENT},
            206: {"content": _CONTENT},
            304: {"description": "Unchanged."},
        },
    )
    @routes.head("/v1/bundles/{key:path}/leaves/{index}", include_in_schema=False)
    async def get_leaf(
        key: str,
        index: int,
        request: Request,
        format: Literal["raw", "npy"] = "raw",  # noqa: A002 - the name of the parameter in the URL
        slice: Annotated[str, Query(max_length=400, description="As in numpy, such as `0:2,:,5`.")] = "",  # noqa: A002
    ) -> Response:
        """One leaf as raw little-endian bytes in C order, or as .npy; Range and ETag are supported."""
        service.check_key(request, key, "read")
        content = await service.call(
            lambda: _Content.of(_sliced(service.store.get_leaf(key, index), slice), format)
        )
        return _conditional(request, content)

    return routes


@dataclass(frozen=True)
class _Content:
    """What is sent of a leaf, whole, and the headers that say what it is."""

    body: memoryview
    media_type: str
    headers: Mapping[str, str]

    @classmethod
    def of(cls, host: Any, form: Literal["raw", "npy"]) -> Self:
        body = (
            _npy(host) if form == "npy" else memoryview(np.ascontiguousarray(host).reshape(-1).view(np.uint8))
        )
        headers = {
            "ETag": f'"{digest_of(body).hex()}"',
            "Accept-Ranges": "bytes",
            "Residual-Dtype": name_of(host.dtype),
            "Residual-Shape": ",".join(map(str, host.shape)),
        }
        return cls(body, "application/x-npy" if form == "npy" else "application/octet-stream", headers)

    @property
    def etag(self) -> str:
        return self.headers["ETag"]


def _sliced(host: Any, text: str) -> Any:
    if not text:
        return host
    parts = text.split(",")
    if len(parts) > host.ndim or not all(part and _SLICE.fullmatch(part) for part in parts):
        raise InvalidOption(
            f"the slice has the form 0:2,:,5 with at most {host.ndim} parts for this leaf", option="slice"
        )
    selection = tuple(_part(part) for part in parts)
    try:
        return host[selection]
    except IndexError as error:
        raise InvalidOption(f"the slice is outside the leaf: {error}", option="slice") from None


def _part(text: str) -> int | slice:
    start, colon, stop = text.partition(":")
    return slice(int(start) if start else None, int(stop) if stop else None) if colon else int(start)


def _npy(host: Any) -> memoryview:
    if host.dtype.name not in NUMPY_NAMES:
        raise NotAcceptable(
            f"the .npy format has no dtype {name_of(host.dtype)}; ask for format=raw, which has the bytes as they are"
        )
    buffer = io.BytesIO()
    np.save(buffer, host, allow_pickle=False)
    return buffer.getbuffer()


def _conditional(request: Request, content: _Content) -> Response:
    known = request.headers.get("if-none-match", "").strip()
    if known == "*" or content.etag in known:
        return Response(status_code=304, headers=content.headers)
    asked = _asked(request, content.etag)
    if asked is None:
        return _sent(request, content, content.body, {})
    length = len(content.body)
    start, stop = _bounds(asked, length)
    bounds = {"Content-Range": f"bytes {start}-{stop - 1}/{length}"}
    return _sent(request, content, content.body[start:stop], bounds, status_code=206)


def _sent(
    request: Request, content: _Content, body: memoryview, more: Mapping[str, str], *, status_code: int = 200
) -> Response:
    """The answer with this part of the content, without a copy of it."""
    headers = {**content.headers, **more, "Content-Length": str(len(body))}
    parts = [] if request.method == "HEAD" else [body]
    return PartsResponse(parts, headers=headers, media_type=content.media_type, status_code=status_code)


def _asked(request: Request, etag: str) -> re.Match[str] | None:
    """The range that is asked for; None for the whole, and for what is none, such as one that ends before it starts (RFC 9110, 14.1.1)."""
    asked = _RANGE.fullmatch(request.headers.get("range", "").strip())
    if asked is None or not any(asked.groups()) or request.headers.get("if-range", etag) != etag:
        return None
    first, last = asked.groups()
    return None if first and last and int(first) > int(last) else asked


def _bounds(asked: re.Match[str], length: int) -> tuple[int, int]:
    first, last = asked.groups()
    start = int(first) if first else max(length - int(last or 0), 0)
    stop = min(int(last) + 1, length) if first and last else length
    if start >= stop:
        raise RangeNotSatisfiable(f"the range lies outside the {length} bytes of the leaf", length=length)
    return start, stop
