"""The body of a request, as the client sends it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from residual_store.bundle import Bundle
from residual_store.copier import Copier
from residual_store.frame import MEDIA_TYPE, frame_head, frame_nbytes, frame_parts

__all__ = ["Body", "frame_body"]

_TOLD_EVERY = 4 << 20


@dataclass(frozen=True)
class Body:
    """A body that can be sent again: its length, a fresh run of its parts, and its xxh3-128 if it has no other.

    ``parts`` is called when the headers have been sent, so what it does is done while the server admits the request.
    """

    nbytes: int
    parts: Callable[[], Iterable[memoryview]]
    digest: str | None = None
    media_type: str = MEDIA_TYPE


def frame_body(bundle: Bundle, *, copier: Copier, moved: Callable[[int], object]) -> Body:
    """The frame of a bundle, whose digests the ``copier`` takes; ``moved`` is told how many bytes of the leaves have gone out.

    Raises `InvalidFrame`, when it is sent, if a leaf is not as long as the manifest says.
    """
    unsealed = frame_head(bundle.manifest)

    @functools.cache
    def sealed() -> tuple[bytes, Bundle]:
        whole = bundle.sealed(copier=copier)
        return (unsealed if whole is bundle else frame_head(whole.manifest)), whole

    return Body(frame_nbytes(unsealed, bundle.manifest), lambda: _told(*sealed(), moved))


def _told(head: bytes, bundle: Bundle, moved: Callable[[int], object]) -> Iterator[memoryview]:
    """The frame in parts that are not long."""
    sent = -len(head)
    for part in frame_parts(head, bundle):
        for start in range(0, len(part), _TOLD_EVERY):
            piece = part[start : start + _TOLD_EVERY]
            yield piece
            sent += len(piece)
            moved(max(sent, 0))
