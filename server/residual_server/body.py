"""Bodies: taking in a frame or a program as it comes, within limits of size and time."""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import AsyncGenerator
from dataclasses import replace

import msgspec
from fastapi import Request

from residual_server.direct_body import EXTENSION, DirectBody
from residual_server.service import Service, is_quick
from residual_store.bundle import Bundle
from residual_store.digest import DIGEST_BYTES
from residual_store.engine.local import LocalStore
from residual_store.errors import InvalidFrame, InvalidOption, TooLarge, UnsupportedMedia, UploadStalled
from residual_store.frame import MEDIA_TYPE, FrameReader
from residual_store.manifest import Manifest
from residual_store.place import BlockName
from residual_store.segment import Segment
from residual_store.settings import Settings
from residual_store.shared_leaf import SharedLeaf
from residual_store.store import IfExists

__all__ = ["receive_bundle", "receive_leaves", "receive_placed", "receive_program"]

_DIRECT = 256 << 10
_BINARY = ("application/octet-stream", MEDIA_TYPE, "application/x-www-form-urlencoded", "")
"""What curl and plain HTTP clients say of a binary body; the second last is what ``curl --data-binary`` says."""


async def receive_bundle(request: Request, store: LocalStore, key: str, if_exists: IfExists) -> Bundle:
    """The bundle in the body, received into a segment of the store and verified.

    Whatever can be refused is refused at the manifest, before a byte of a leaf is read.
    """
    reader = _reader(request, store.settings)
    segment: Segment | None = None
    async with contextlib.aclosing(_chunks(request, store.settings)) as chunks:
        async for chunk in chunks:
            rest = reader.feed(chunk)
            manifest = reader.manifest
            if manifest is None or segment is not None:
                continue
            segment = await _admitted(store, key, manifest, if_exists)
            reader.place(segment.memory)
            reader.feed(rest)
            if await _filled_directly(request, reader, store.settings):
                break
    return replace(reader.bundle(), place=segment.place if segment is not None else None)


async def _admitted(store: LocalStore, key: str, manifest: Manifest, if_exists: IfExists) -> Segment:
    """Memory for a bundle; a thread gets it where that may take longer than to have a thread do it."""
    is_little = is_quick(store, fresh_bytes=manifest.nbytes)
    if is_quick(store) and not is_little:
        segment = store.admission.admit_at_once(key, manifest, if_exists=if_exists)
        if segment is not None:
            return segment
    admit = functools.partial(store.admission.admit, key, manifest, if_exists=if_exists)
    return await Service.call(admit, at_once=is_little)


async def receive_placed(request: Request, store: LocalStore, key: str, block: BlockName) -> Bundle:
    """The bundle whose head is in the body, and whose leaves a client on this host puts into a block.

    The digests of all leaves may follow the head.
    So a client sends the head first and then copies the leaves; the block is taken over meanwhile, and when the digests come
    there is little left to do.
    """
    _check_headers(request)
    reader, digests = FrameReader(store.settings, leaves_apart=True), bytearray()
    placed: Bundle | None = None
    adopt = functools.partial(_placed, store, key, reader, block)
    async with contextlib.aclosing(_chunks(request, store.settings)) as chunks:
        async for chunk in chunks:
            digests += reader.feed(chunk)
            if reader.manifest is None:
                continue
            if placed is None:
                at_once = is_quick(store, leaves=len(reader.manifest.leaves))
                placed = await Service.call(adopt, at_once=at_once)
            if len(digests) > DIGEST_BYTES * len(reader.manifest.leaves):
                break
    if placed is None:
        raise InvalidFrame("the body ends before the head of the frame does")
    return _sealed(placed, bytes(digests))


def _placed(store: LocalStore, key: str, reader: FrameReader, block: BlockName) -> Bundle:
    assert reader.manifest is not None
    segment = store.admission.adopt(key, block, reader.manifest)
    return replace(reader.adopt(segment.memory), place=segment.place)


def _sealed(bundle: Bundle, digests: bytes) -> Bundle:
    leaves = len(bundle.manifest.leaves)
    if len(digests) not in (0, DIGEST_BYTES * leaves):
        raise InvalidFrame(
            "with a segment, the body is the head of the frame, or the head and a digest of 16 bytes for each leaf; "
            f"here {len(digests)} bytes follow the head, and there are {leaves} leaves"
        )
    if digests:
        starts = range(0, len(digests), DIGEST_BYTES)
        bundle = bundle.with_digests([digests[start : start + DIGEST_BYTES] for start in starts])
    if not bundle.is_sealed:
        raise InvalidFrame("a leaf has no digest; send those of all leaves after the head")
    return bundle


def _reader(request: Request, settings: Settings) -> FrameReader:
    length = _check_headers(request)
    if length is not None and length > settings.max_bundle_bytes:
        raise TooLarge(
            f"the body has {length} bytes; the limit max_bundle_bytes is {settings.max_bundle_bytes}"
        )
    return FrameReader(settings, total=length)


async def _filled_directly(request: Request, reader: FrameReader, settings: Settings) -> bool:
    """Receive the rest of a large body straight into its place, if the server can do that."""
    direct: DirectBody | None = request.scope.get("extensions", {}).get(EXTENSION)
    if direct is None or len(reader.buffer()) < _DIRECT or "content-length" not in request.headers:
        return False
    try:
        return await direct.fill(reader, idle_seconds=settings.idle_body_seconds)
    except TimeoutError:
        raise _stalled(settings) from None


async def receive_program(request: Request, settings: Settings) -> bytes:
    """The program in the body."""
    limit = settings.max_program_bytes
    return await _receive(
        request, settings, limit, f"the program is above the limit max_program_bytes of {limit}"
    )


async def receive_leaves(request: Request, settings: Settings) -> list[SharedLeaf]:
    """The names of leaves in the body, which is JSON."""
    limit = settings.max_manifest_bytes
    content = await _receive(
        request,
        settings,
        limit,
        f"the body is above the limit max_manifest_bytes of {limit}",
        kinds=("application/json", ""),
    )
    try:
        leaves = msgspec.json.decode(content, type=list[SharedLeaf])
    except (msgspec.MsgspecError, ValueError, RecursionError):
        raise InvalidOption("the body is not a JSON list of leaves, each {digest, dtype, shape}") from None
    if len(leaves) > settings.max_leaves:
        raise TooLarge(f"the body names {len(leaves)} leaves; the limit max_leaves is {settings.max_leaves}")
    return leaves


async def _receive(
    request: Request, settings: Settings, limit: int, beyond: str, kinds: tuple[str, ...] = _BINARY
) -> bytes:
    length, content = _check_headers(request, kinds), bytearray()
    async for chunk in _chunks(request, settings):
        content += chunk
        if len(content) > limit:
            raise TooLarge(beyond)
    if length is not None and length != len(content):
        raise InvalidFrame(f"the body has {len(content)} bytes and Content-Length says {length}")
    return bytes(content)


def _check_headers(request: Request, kinds: tuple[str, ...] = _BINARY) -> int | None:
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    coding = request.headers.get("content-encoding", "identity").strip().lower()
    if kind not in kinds:
        raise UnsupportedMedia(
            f"the content type {kind[:60]!r} is not what this route takes; send {kinds[0]}"
        )
    if coding not in ("identity", ""):
        raise UnsupportedMedia(
            f"the content encoding {coding[:60]!r} is not supported; send the bytes as they are"
        )
    transfer = request.headers.get("transfer-encoding", "chunked").strip().lower()
    if transfer != "chunked":
        raise UnsupportedMedia(
            f"the transfer encoding {transfer[:60]!r} is not supported; send the bytes as they are"
        )
    length = request.headers.get("content-length")
    return int(length) if length is not None else None


async def _chunks(request: Request, settings: Settings) -> AsyncGenerator[bytes]:
    clock = asyncio.get_running_loop().time
    try:
        async with asyncio.timeout(settings.idle_body_seconds) as limit:
            async for chunk in request.stream():
                limit.reschedule(None)
                yield chunk
                limit.reschedule(clock() + settings.idle_body_seconds)
    except TimeoutError:
        raise _stalled(settings) from None


def _stalled(settings: Settings) -> UploadStalled:
    return UploadStalled(
        f"the body brought nothing for {settings.idle_body_seconds:g} s and was discarded; send it again"
    )
