"""An endpoint: where a server listens, out of its URL."""

from __future__ import annotations

import urllib.parse
from dataclasses import dataclass

from residual_store.errors import InvalidOption

__all__ = ["Endpoint"]


@dataclass(frozen=True, kw_only=True)
class Endpoint:
    """A host and port, or the path of a unix socket, and the path under which a proxy shows the server.

    >>> Endpoint.of("http://127.0.0.1:8731/store").base
    '/store'
    """

    scheme: str
    host: str = ""
    port: int | None = None
    socket: str = ""
    base: str = ""

    @classmethod
    def of(cls, url: str) -> Endpoint:
        """The endpoint of an ``http://``, ``https://`` or ``unix://`` URL; raises `InvalidOption`."""
        try:
            parts = urllib.parse.urlsplit(url)
            host, port = parts.hostname or "", parts.port if parts.scheme != "unix" else None
        except ValueError as error:
            raise InvalidOption(f"{url} is not the URL of a server: {error}") from None
        if parts.username or parts.password or parts.query or parts.fragment:
            raise InvalidOption(
                "the URL of a server has a host, a port and a path; give a token as the option token"
            )
        if parts.scheme == "unix":
            return cls(scheme="unix", socket=urllib.parse.unquote(parts.netloc + parts.path))
        if not host:
            raise InvalidOption(f"{url} names no host")
        return cls(scheme=parts.scheme, host=host, port=port, base=parts.path.rstrip("/"))
