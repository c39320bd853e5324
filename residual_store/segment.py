"""A segment: the host memory of one bundle."""

from __future__ import annotations

from dataclasses import dataclass

from residual_store.bundle import Payload
from residual_store.place import Place

__all__ = ["Segment"]


@dataclass(frozen=True, kw_only=True, eq=False)
class Segment:
    """Memory for the leaf area of one bundle.

    ``memory`` is page-aligned if the segment is pooled, and 64-byte aligned if it is a small one; it is not zeroed.
    ``place`` says where other processes of this host find it, if they can.
    """

    memory: Payload
    place: Place | None = None
