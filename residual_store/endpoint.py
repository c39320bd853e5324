"""An endpoint: where a server listens, out of its URL."""

from __future__ import annotations

import socket
import ssl
import urllib.parse
from dataclasses import dataclass

from residual_store.errors import InvalidOption

__all__ = ["Endpoint", "advice_on"]


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
        base = parts.path.rstrip("/")
        if base.endswith("/v1") or "/v1/" in base:
            raise InvalidOption(
                f"{url} is the URL of a route; the client adds /v1 and what follows itself, so leave it out"
            )
        return cls(scheme=parts.scheme, host=host, port=port, base=base)


def advice_on(error: Exception) -> str:
    """What to look at where no connection comes about, to be added to a text.

    >>> advice_on(ConnectionRefusedError())
    '; is the server running (residual-store serve), and is this its URL?'
    """
    if isinstance(error, ssl.SSLCertVerificationError):
        return "; let SSL_CERT_FILE name the certificate of whoever signed that of the server"
    if isinstance(error, ssl.SSLError):
        return "; does the server speak TLS? residual-store serve does not, and has http:// URLs"
    if isinstance(error, ConnectionRefusedError | FileNotFoundError | socket.gaierror):
        return "; is the server running (residual-store serve), and is this its URL?"
    return ""
