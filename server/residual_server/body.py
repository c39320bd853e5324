"""Bodies: taking in a frame or a program as it comes, within limits of size and time."""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import AsyncGenerator, Iterator
from dataclasses import replace

import anyio.to_thread
from fastapi import Request

from residual_server.direct_body import EXTENSION, DirectBody
from residual_store.bundle import Bundle
from residual_store.engine.local import LocalStore
from residual_store.errors import InvalidFrame, TooLarge, UnsupportedMedia, UploadStalled
from residual_store.frame import MEDIA_TYPE, FrameReader
from residual_store.segments import Segment
from residual_store.settings import Settings
from residual_store.store import IfExists

__all__ = ["receive_bundle", "receive_head", "receive_program", "slices"]

_SLICE = 1 << 20
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
            admit = functools.partial(store.admission.admit, key, manifest, if_exists=if_exists)
            segment = await anyio.to_thread.run_sync(admit)
            reader.place(segment.memory)
            reader.feed(rest)
            if await _filled_directly(request, reader, store.settings):
                break
    return replace(reader.bundle(), place=segment.place if segment is not None else None)


async def receive_head(request: Request, settings: Settings) -> FrameReader:
    """The head of a frame, which is all that is in the body: a client on this host has put the leaves into a segment."""
    reader = _reader(request, settings, leaves_apart=True)
    async with contextlib.aclosing(_chunks(request, settings)) as chunks:
        async for chunk in chunks:
            if reader.feed(chunk):
                raise InvalidFrame("the body goes on after the head; the leaves are in the segment")
    if reader.manifest is None:
        raise InvalidFrame("the body ends before the head of the frame does")
    return reader


def _reader(request: Request, settings: Settings, *, leaves_apart: bool = False) -> FrameReader:
    length = _check_headers(request)
    if length is not None and length > settings.max_bundle_bytes:
        raise TooLarge(
            f"the body has {length} bytes; the limit max_bundle_bytes is {settings.max_bundle_bytes}"
        )
    return FrameReader(settings, total=length, leaves_apart=leaves_apart)


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
    length, program = _check_headers(request), bytearray()
    async for chunk in _chunks(request, settings):
        program += chunk
        if len(program) > settings.max_program_bytes:
            raise TooLarge(
                f"the program is above the limit max_program_bytes of {settings.max_program_bytes}"
            )
    if length is not None and length != len(program):
        raise InvalidFrame(f"the body has {len(program)} bytes and Content-Length says {length}")
    return bytes(program)


def _check_headers(request: Request) -> int | None:
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    coding = request.headers.get("content-encoding", "identity").strip().lower()
    if kind not in _BINARY:
        raise UnsupportedMedia(
            f"the content type {kind[:60]!r} is not a frame's; send application/octet-stream"
        )
    if coding not in ("identity", ""):
        raise UnsupportedMedia(
            f"the content encoding {coding[:60]!r} is not supported; send the bytes as they are"
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


def slices(part: memoryview) -> Iterator[memoryview]:
    """``part`` in pieces that do not hold up other work on the event loop."""
    for start in range(0, len(part), _SLICE):
        yield part[start : start + _SLICE]
