"""The frame: one bundle as one run of bytes, on the wire and in memory.

::

    b"RSB1" | u32 flags = 0 | u64 manifest length | manifest | zeros up to a multiple of 4096 | leaves

All numbers are little-endian.
The offset of a leaf counts from the start of the leaf area, and its first byte is 64-byte aligned.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator

import numpy as np

from residual_store.bundle import Bundle, Payload
from residual_store.errors import InvalidFrame, TooLarge
from residual_store.manifest import ALIGNMENT, Manifest, decode, encode
from residual_store.settings import Settings

__all__ = ["MEDIA_TYPE", "FrameReader", "aligned_empty", "frame_head", "frame_nbytes", "frame_parts"]

MEDIA_TYPE = "application/vnd.residual-store.frame"

_HEADER = struct.Struct("<4sIQ")
_MAGIC = b"RSB1"
_PAGE = 4096


def _page_end(nbytes: int) -> int:
    return -(-nbytes // _PAGE) * _PAGE


def frame_head(manifest: Manifest) -> bytes:
    """Everything of a frame that stands before its leaves.

    >>> len(frame_head(Manifest()))
    4096
    """
    packed = encode(manifest)
    head = _HEADER.pack(_MAGIC, 0, len(packed)) + packed
    return head.ljust(_page_end(len(head)), b"\0")


def frame_nbytes(head: bytes, manifest: Manifest) -> int:
    """The length of the whole frame, which is its Content-Length."""
    return len(head) + manifest.nbytes


def frame_parts(head: bytes, bundle: Bundle) -> Iterator[memoryview]:
    """The frame as views, in order and without a copy of any leaf."""
    yield memoryview(head)
    end = 0
    for leaf, payload in zip(bundle.manifest.leaves, bundle.payloads, strict=True):
        if leaf.nbytes:
            if leaf.offset > end:
                yield memoryview(bytes(leaf.offset - end))
            yield memoryview(payload)
            end = leaf.offset + leaf.nbytes


def aligned_empty(nbytes: int) -> Payload:
    """Uninitialized bytes whose address is a multiple of 64.

    JAX's CPU backend uses a host buffer in place only if it is so aligned.
    """
    memory = np.empty(nbytes + ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % ALIGNMENT
    return memory[start : start + nbytes]


class FrameReader:
    """Takes in one frame piece by piece, straight into the memory where its leaves will stay.

    Ask `buffer` where the next bytes belong, put some there, and say how many to `received`.
    ``total`` is the announced length of the frame, if there is one.
    ``reserve`` is called with the size of the leaf area before that is allocated, and may refuse it.

    Raises `InvalidFrame`, `InvalidManifest` or `TooLarge` as soon as the bytes so far cannot become a frame.
    """

    def __init__(
        self,
        settings: Settings,
        *,
        total: int | None = None,
        reserve: Callable[[Manifest, int], None] = lambda manifest, nbytes: None,
    ) -> None:
        self._settings = settings
        self._total = total
        self._reserve = reserve
        self._manifest: Manifest | None = None
        self._leaves = np.empty(0, np.uint8)
        self._steps = self._run()
        self._view = next(self._steps)

    @property
    def manifest(self) -> Manifest | None:
        """The manifest, once it has come in."""
        return self._manifest

    @property
    def complete(self) -> bool:
        """Whether the last byte has come in."""
        return self._manifest is not None and not self._view

    def buffer(self) -> memoryview:
        """The memory for the next bytes; empty when the frame is complete."""
        return self._view

    def received(self, count: int) -> None:
        """Note that the first ``count`` bytes of `buffer` are filled."""
        self._view = self._view[count:]
        while not self._view and not self.complete:
            self._view = next(self._steps)

    def feed(self, chunk: bytes | memoryview) -> None:
        """Copy ``chunk`` to where it belongs; raises `InvalidFrame` for bytes after the end."""
        rest = memoryview(chunk)
        while rest:
            if self.complete:
                raise InvalidFrame("the body goes on after the last leaf; a frame has no trailing bytes")
            count = min(len(rest), len(self._view))
            self._view[:count] = rest[:count]
            self.received(count)
            rest = rest[count:]

    def bundle(self) -> Bundle:
        """The bundle, with the digest of every leaf checked; raises `InvalidFrame` if bytes are missing or wrong."""
        if self._manifest is None or not self.complete:
            raise InvalidFrame(
                "the body ends before the frame does; send the whole frame, with curl --data-binary @file"
            )
        leaves = self._leaves
        leaves.flags.writeable = False
        payloads = tuple(leaves[leaf.offset : leaf.offset + leaf.nbytes] for leaf in self._manifest.leaves)
        bundle = Bundle(manifest=self._manifest, payloads=payloads, owned=True)
        bundle.verify(InvalidFrame)
        return bundle

    def _run(self) -> Iterator[memoryview]:
        header = bytearray(_HEADER.size)
        yield memoryview(header)
        packed = bytearray(self._manifest_length(header))
        yield memoryview(packed)
        manifest = decode(memoryview(packed), self._settings)
        head = _page_end(_HEADER.size + len(packed))
        self._check_length(head + manifest.nbytes)
        padding = head - _HEADER.size - len(packed)
        if padding:
            yield memoryview(bytearray(padding))
        self._reserve(manifest, manifest.nbytes)
        self._leaves = aligned_empty(manifest.nbytes)
        self._manifest = manifest
        yield memoryview(self._leaves)

    def _manifest_length(self, header: bytearray) -> int:
        magic, flags, length = _HEADER.unpack(header)
        if magic != _MAGIC:
            raise InvalidFrame(
                f"the body starts with {bytes(magic)!r} and not with {_MAGIC!r}, so it is not a frame; "
                "send the bytes of a frame unchanged, with curl --data-binary @file"
            )
        if flags:
            raise InvalidFrame(f"the frame has flags {flags:#x}; this release knows none")
        if length > self._settings.max_manifest_bytes:
            raise TooLarge(
                f"the manifest has {length} bytes; the limit max_manifest_bytes is {self._settings.max_manifest_bytes}"
            )
        return int(length)

    def _check_length(self, nbytes: int) -> None:
        if nbytes > self._settings.max_bundle_bytes:
            raise TooLarge(
                f"the frame has {nbytes} bytes; the limit max_bundle_bytes is {self._settings.max_bundle_bytes}"
            )
        if self._total is not None and self._total != nbytes:
            raise InvalidFrame(
                f"the body has {self._total} bytes and the frame's manifest says {nbytes}; "
                "send the bytes of a frame unchanged, with curl --data-binary @file"
            )
