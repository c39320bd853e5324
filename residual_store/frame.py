"""The frame: one bundle as one run of bytes, on the wire and in memory.

::

    b"RSB1" | u32 flags = 0 | u64 manifest length | manifest | zeros up to a multiple of 4096 | leaves

All numbers are little-endian.
The offset of a leaf counts from the start of the leaf area, and its first byte is 64-byte aligned.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator

import numpy as np

from residual_store.bundle import Bundle, Payload
from residual_store.errors import InvalidFrame, TooLarge
from residual_store.manifest import Manifest, decode, encode
from residual_store.settings import Settings
from residual_store.verification import Verification

__all__ = [
    "MEDIA_TYPE",
    "FrameReader",
    "aligned_empty",
    "frame_head",
    "frame_nbytes",
    "frame_parts",
]

MEDIA_TYPE = "application/vnd.residual-store.frame"

_HEADER = struct.Struct("<4sIQ")
_MAGIC = b"RSB1"
_PAGE = 4096
_SMALL = 64 << 10
"""Bytes from which a leaf is sent from where it lies."""

_LONGEST_RUN = 256 << 10
"""Bytes that are joined at most: more would be fresh memory each time, whose page faults cost more than a write."""


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
    """The frame in order, without a copy of any large leaf; small ones are joined, because a write for each is slow.

    Large leaves are views of arrays and all else is ``bytes``, by which a sender knows what stays where it is.
    """
    if bundle.area is not None:
        yield memoryview(head)
        yield memoryview(bundle.area)
        return
    run: list[bytes | Payload] = [head]
    length, end = len(head), 0
    for leaf, payload in zip(bundle.manifest.leaves, bundle.payloads, strict=True):
        nbytes, offset = leaf.nbytes, leaf.offset
        if not nbytes:
            continue
        if offset > end:
            run.append(bytes(offset - end))
        end = offset + nbytes
        if nbytes < _SMALL:
            run.append(payload)
            length += nbytes
            if length < _LONGEST_RUN:
                continue
        yield memoryview(b"".join(run))
        run, length = [], 0
        if nbytes >= _SMALL:
            yield memoryview(payload)
    if run:
        yield memoryview(b"".join(run))


def aligned_empty(nbytes: int) -> Payload:
    """Uninitialized bytes that start on a page, so that each leaf's address is a multiple of 64.

    JAX's CPU backend uses a host buffer in place only if it is so aligned.
    Large numpy arrays start 16 bytes into a page, and a copy is a fifth slower where its target lies a few bytes further
    into a page than its source.
    """
    memory = np.empty(nbytes + _PAGE, np.uint8)
    start = -memory.ctypes.data % _PAGE
    return memory[start : start + nbytes]


class FrameReader:
    """Takes in one frame piece by piece, straight into the memory where its leaves will stay.

    Ask `buffer` where the next bytes belong, put some there, and say how many to `received`.
    When `awaits_memory` is true, look at `manifest`, decide whether to go on, and `place` the leaves.
    Digests are checked as the leaves come in.
    ``total`` is the announced length, if there is one; with ``leaves_apart`` that of a frame without its leaf area, which
    comes another way and is given to `adopt`.

    Raises `InvalidFrame`, `InvalidManifest` or `TooLarge` as soon as the bytes so far cannot become a frame.

    >>> reader = FrameReader(Settings())
    >>> _ = reader.feed(frame_head(Manifest()))
    >>> reader.awaits_memory
    True
    """

    def __init__(self, settings: Settings, *, total: int | None = None, leaves_apart: bool = False) -> None:
        self._settings = settings
        self._total = total
        self._leaves_apart = leaves_apart
        self._verification: Verification | None = None
        self._manifest: Manifest | None = None
        self._leaves: Payload | None = None
        self._steps = self._head_steps()
        self._view = next(self._steps)

    @property
    def manifest(self) -> Manifest | None:
        """The manifest, once it has come in."""
        return self._manifest

    @property
    def awaits_memory(self) -> bool:
        """Whether the head has come in whole and the leaves have no place yet."""
        return self._manifest is not None and self._leaves is None

    @property
    def complete(self) -> bool:
        """Whether the last byte has come in."""
        return self._leaves is not None and not self._view

    def place(self, leaves: Payload) -> None:
        """Give the memory of the leaf area: uint8, ``manifest.nbytes`` long, 64-byte aligned."""
        assert self._manifest is not None
        self._leaves = leaves
        self._view = memoryview(leaves)
        self._verification = Verification(self._manifest, self._view)

    def adopt(self, leaves: Payload) -> Bundle:
        """The bundle whose leaf area is ``leaves``, in host memory, where nobody checks digests again.

        Raises `InvalidFrame` if the area has another length.
        """
        assert self._manifest is not None
        if leaves.nbytes != self._manifest.nbytes:
            raise InvalidFrame(
                f"the leaf area has {leaves.nbytes} bytes and the frame's manifest says {self._manifest.nbytes}"
            )
        return Bundle.of_area(self._manifest, leaves)

    def buffer(self) -> memoryview:
        """The memory for the next bytes; empty when the frame is complete or awaits memory."""
        return self._view

    def received(self, count: int) -> None:
        """Note that the first ``count`` bytes of `buffer` are filled."""
        self._view = self._view[count:]
        if self._verification is not None and self._leaves is not None:
            self._verification.arrived(self._leaves.nbytes - len(self._view))
        while not self._view and self._manifest is None:
            self._view = next(self._steps, memoryview(b""))

    def feed(self, chunk: bytes | memoryview) -> memoryview:
        """Copy ``chunk`` to where it belongs and return what has no place yet, see `awaits_memory`.

        Raises `InvalidFrame` for bytes after the end.
        """
        rest = memoryview(chunk)
        while rest and not self.awaits_memory:
            if self.complete:
                raise InvalidFrame("the body goes on after the last leaf; a frame has no trailing bytes")
            count = min(len(rest), len(self._view))
            self._view[:count] = rest[:count]
            self.received(count)
            rest = rest[count:]
        return rest

    def bundle(self) -> Bundle:
        """The bundle, its digests checked; raises `InvalidFrame` if bytes are missing or wrong."""
        leaves = self._leaves
        if self._manifest is None or leaves is None or not self.complete:
            raise InvalidFrame(
                "the body ends before the frame does; send the whole frame, with curl --data-binary @file"
            )
        assert self._verification is not None
        self._verification.finish()
        return Bundle.of_area(self._manifest, leaves)

    def _head_steps(self) -> Iterator[memoryview]:
        header = bytearray(_HEADER.size)
        yield memoryview(header)
        packed = bytearray(self._manifest_length(header))
        yield memoryview(packed)
        manifest = decode(bytes(packed), self._settings)
        head = _page_end(_HEADER.size + len(packed))
        self._check_length(head, manifest.nbytes)
        yield memoryview(bytearray(head - _HEADER.size - len(packed)))
        self._manifest = manifest

    def _manifest_length(self, header: bytearray) -> int:
        magic, flags, length = _HEADER.unpack(header)
        if magic != _MAGIC:
            raise InvalidFrame(
                f"the body starts with {bytes(magic)!r} and not with {_MAGIC!r}, so it is not a frame; "
                "send the bytes of a frame unchanged, with curl --data-binary @file"
            )
        if flags:
            raise InvalidFrame(
                f"the frame has flags {flags:#x}, and this release knows none; "
                "send the bytes of a frame unchanged, with curl --data-binary @file"
            )
        if length > self._settings.max_manifest_bytes:
            raise TooLarge(
                f"the manifest has {length} bytes; the limit max_manifest_bytes is {self._settings.max_manifest_bytes}"
            )
        return int(length)

    def _check_length(self, head: int, leaves: int) -> None:
        nbytes = head + leaves
        if nbytes > self._settings.max_bundle_bytes:
            raise TooLarge(
                f"the frame has {nbytes} bytes; the limit max_bundle_bytes is {self._settings.max_bundle_bytes}"
            )
        if self._leaves_apart:
            nbytes = head
        if self._total is not None and self._total != nbytes:
            raise InvalidFrame(
                f"the body has {self._total} bytes and the frame's manifest says {nbytes}; "
                "send the bytes of a frame unchanged, with curl --data-binary @file"
            )
