"""The parts response: a body that lies in memory in several parts, sent without copies."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from residual_server.direct_answer import EXTENSION, DirectAnswer

__all__ = ["PartsResponse"]

_SLICE = 1 << 20
_DIRECT = 1 << 20


class PartsResponse(Response):
    """Sends ``parts``, the length of which the ``headers`` have; large ones are written by a thread, if the server can do that."""

    def __init__(
        self,
        parts: Iterable[memoryview],
        *,
        headers: Mapping[str, str],
        media_type: str,
        status_code: int = 200,
    ) -> None:
        self.status_code = status_code
        self.media_type = media_type
        self.background = None
        self._parts = parts
        self.init_headers(headers)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        direct: DirectAnswer | None = scope.get("extensions", {}).get(EXTENSION)
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        for part in self._parts:
            written = await direct.write(part) if direct is not None and len(part) >= _DIRECT else 0
            for piece in _slices(part[written:]):
                await send({"type": "http.response.body", "body": piece, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


def _slices(part: memoryview) -> Iterator[memoryview]:
    """``part`` in pieces that do not hold up other work on the event loop."""
    for start in range(0, len(part), _SLICE):
        yield part[start : start + _SLICE]
