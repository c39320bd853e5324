"""``/v1/bundles/{key}``: put, get and delete one bundle."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from typing import Annotated, Any, Literal

import fastapi
import msgspec
from fastapi import APIRouter, Request, Response
from pydantic import Field

from residual_server.body import receive_bundle, receive_placed
from residual_server.direct_route import DirectRoute, Query
from residual_server.parts_response import PartsResponse
from residual_server.problems import PROBLEM
from residual_server.service import Service, is_quick
from residual_store.bundle import Bundle
from residual_store.frame import MEDIA_TYPE, frame_head, frame_nbytes, frame_parts
from residual_store.parts import Part
from residual_store.place import ARENA_HEADER, SEGMENT_HEADER, BlockName, Place
from residual_store.stat import digest_of_manifest
from residual_store.store import IfExists, Receipt

__all__ = ["router"]

_FRAME: dict[str, Any] = {MEDIA_TYPE: {"schema": {"type": "string", "format": "binary"}}}
_FRAME_BODY: dict[str, Any] = {
    "requestBody": {
        "required": True,
        "description": "One frame.",
        "content": {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}, **_FRAME},
    }
}

_AT_ONCE = 64 << 10
"""Bytes of a frame that is joined and sent in one piece, because each piece costs more than its copy."""


class _PutQuery(Query, frozen=True):
    durability: Literal["host", "disk"] | None = None
    ttl: float | None = Field(None, gt=0, description="Lease in seconds.")
    if_exists: IfExists = "error"
    segment: str | None = Field(
        None,
        pattern=r"^[\w-]{1,64}:[0-9]{1,18}:[0-9a-f]{32}$",
        description="The block that holds the leaves.",
    )
    part: str | None = Field(
        None, pattern=r"^\d{1,6}/\d{1,6}$", description="Which part of how many the frame is."
    )


class _GetQuery(Query, frozen=True):
    wait: float = Field(0.0, ge=0, description="Seconds to wait for a bundle that is not there yet.")


class _DeleteQuery(Query, frozen=True):
    digest: str | None = Field(None, description="That of a receipt, or of the ETag of a get.")


def router(service: Service) -> APIRouter:
    """The routes of bundles."""
    routes = APIRouter(tags=["bundles"], responses=PROBLEM, route_class=DirectRoute)
    store = service.store

    @routes.put(
        "/v1/bundles/{key:path}",
        operation_id="putBundle",
        status_code=201,
        response_model=Receipt,
        openapi_extra=_FRAME_BODY,
    )
    async def put_bundle(
        key: str, request: Request, query: Annotated[_PutQuery, fastapi.Query()]
    ) -> Response:
        """Store one frame under a key; 201 if it is new, 200 if this very bundle was there already.

        With `segment`, the body ends before the leaf area, which is in shared memory; the digests of all leaves may follow
        the head, which then has zeros for them.
        """
        service.check_key(request, key, "write")
        store.durability(query.durability)
        piece = Part.of_text(query.part) if query.part is not None else None
        # What stands under the key already is no reason to refuse a part before the store has looked at it.
        admitted: IfExists = query.if_exists if piece is None else "replace"
        if query.segment is None:
            bundle = await receive_bundle(request, store, key, admitted)
        else:
            bundle = await receive_placed(request, store, key, BlockName.of_text(query.segment))

        def put() -> Receipt:
            return store.put(
                key,
                bundle,
                durability=query.durability,
                ttl=query.ttl,
                if_exists=query.if_exists,
                part=piece,
            )

        at_once = piece is None and is_quick(store, leaves=len(bundle.manifest.leaves))
        receipt = await service.call(put, at_once=at_once)
        receipt = replace(receipt, transport="http" if query.segment is None else "segment")
        return _told(receipt, bundle.place if piece is None else None)

    @routes.get(
        "/v1/bundles/{key:path}",
        operation_id="getBundle",
        response_class=Response,
        responses={200: {"content": _FRAME}},
    )
    async def get_bundle(
        key: str, request: Request, query: Annotated[_GetQuery, fastapi.Query()]
    ) -> Response:
        """The frame of a bundle; with `wait`, as soon as it arrives.

        A client that has mapped the arena which it names in `Residual-Arena` gets the frame without its leaf area, and in
        `Residual-Segment` the place where that is, followed by those of leaves with the encoding `shared`.
        """
        service.check_key(request, key, "read")
        bundle = await service.when_there(request, key, query.wait, lambda: store.get(key))
        return _placed(bundle, request.headers.get(ARENA_HEADER)) or _framed(bundle)

    @routes.head("/v1/bundles/{key:path}", include_in_schema=False)
    async def head_bundle(
        key: str, request: Request, query: Annotated[_GetQuery, fastapi.Query()]
    ) -> Response:
        """Length and ETag of a bundle, and its `Stat` as JSON in the header Residual-Stat."""
        service.check_key(request, key, "read")
        stat = await service.when_there(request, key, query.wait, lambda: store.stat(key))
        manifest = await service.call(lambda: store.manifest(key))
        headers = {
            "Content-Length": str(frame_nbytes(frame_head(manifest), manifest)),
            "ETag": f'"{stat.digest}"',
            "Residual-Stat": json.dumps(asdict(stat)),
        }
        return Response(headers=headers, media_type=MEDIA_TYPE)

    @routes.delete("/v1/bundles/{key:path}", operation_id="deleteBundle", status_code=204)
    async def delete_bundle(
        key: str, request: Request, query: Annotated[_DeleteQuery, fastapi.Query()]
    ) -> Response:
        """Delete a bundle, with `digest` only the one that it names; 404 if there is none."""
        service.check_key(request, key, "write")
        await service.call(lambda: store.delete(key, digest=query.digest))
        return Response(status_code=204)

    return routes


def _told(receipt: Receipt, place: Place | None) -> Response:
    """The receipt, and where the client finds again what it has put into shared memory, if that stays there."""
    stays = receipt.transport == "segment" and receipt.tier == "host" and not receipt.existed
    return Response(
        msgspec.json.encode(receipt),
        status_code=200 if receipt.existed else 201,
        headers={SEGMENT_HEADER: place.to_text()} if stays and place is not None else {},
        media_type="application/json",
    )


def _placed(bundle: Bundle, arena: str | None) -> Response | None:
    """The head of the frame and the places of its leaves; None unless all are in the ``arena``, which the client has mapped."""
    parts = bundle.parts or (bundle,)
    places = [part.place for part in parts if part.manifest.nbytes]
    shared = [place.to_text() for place in places if place is not None and place.arena == arena]
    if not shared or len(shared) < len(places):
        return None
    headers = {"ETag": _etag(bundle), SEGMENT_HEADER: "; ".join(shared)}
    return Response(frame_head(parts[0].manifest), headers=headers, media_type=MEDIA_TYPE)


def _framed(bundle: Bundle) -> Response:
    """The whole frame."""
    head = frame_head(bundle.manifest)
    length, parts = frame_nbytes(head, bundle.manifest), frame_parts(head, bundle)
    headers = {"Content-Length": str(length), "ETag": _etag(bundle)}
    if length <= _AT_ONCE:
        return Response(b"".join(parts), headers=headers, media_type=MEDIA_TYPE)
    return PartsResponse(parts, headers=headers, media_type=MEDIA_TYPE)


def _etag(bundle: Bundle) -> str:
    return f'"{digest_of_manifest(bundle.manifest)}"'
