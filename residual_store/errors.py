"""Every error of Residual Store, drawn once.

::

    ResidualStoreError
    ├── RequestRefused                 the request is wrong; sending it again changes nothing
    │   ├── InvalidKey                 400  invalid-key
    │   ├── InvalidFrame               400  invalid-frame
    │   ├── InvalidManifest            400  invalid-manifest
    │   ├── Unauthorized               401  unauthorized
    │   ├── Forbidden                  403  forbidden
    │   ├── NotFound                   404  not-found
    │   ├── MethodNotAllowed           405  method-not-allowed
    │   ├── NotAcceptable              406  not-acceptable
    │   ├── AlreadyExists              409  already-exists
    │   ├── SegmentUnavailable         410  segment-unavailable
    │   ├── LeafNotHeld                412  leaf-not-held
    │   ├── TooLarge                   413  too-large
    │   ├── UnsupportedMedia           415  unsupported-media
    │   ├── RangeNotSatisfiable        416  range-not-satisfiable
    │   └── InvalidOption              422  invalid-option
    ├── StoreUnavailable               the request is right; it may work later
    │   ├── UploadStalled              408  upload-stalled
    │   ├── Busy                       429  busy
    │   ├── Stopping                   503  stopping
    │   ├── StoreFull                  507  store-full
    │   ├── Unreachable                 --  unreachable
    │   └── TransferStalled             --  transfer-stalled
    ├── StoreBroken                    the store cannot keep its promise
    │   ├── InternalError              500  internal
    │   └── DataLoss                   500  data-loss
    ├── GradientRefused                going on could give a wrong gradient
    │   ├── LeafUnavailable             --  leaf-unavailable
    │   ├── LeafMismatch                --  leaf-mismatch
    │   ├── BundleReplaced              --  bundle-replaced
    │   ├── ProgramMismatch             --  program-mismatch
    │   ├── ProgramUnavailable          --  program-unavailable
    │   ├── ArgumentMismatch            --  argument-mismatch
    │   ├── CotangentMismatch           --  cotangent-mismatch
    │   ├── PrecisionMismatch           --  precision-mismatch
    │   └── MeshMismatch                --  mesh-mismatch
    └── MissingExtra                    --  missing-extra

The class, its ``code`` and its HTTP ``status`` are one table, `ERRORS`; an ``application/problem+json`` answer (RFC 9457) has the same code.
"""

from __future__ import annotations

from collections.abc import Mapping

from residual_store.error import Field, ResidualStoreError

__all__ = ["ERRORS", "Field", "ResidualStoreError"]


class RequestRefused(ResidualStoreError):
    """The request is wrong, so sending it again changes nothing."""


class InvalidKey(RequestRefused, ValueError):
    """A key or prefix is not of the form ``run/anything/else``."""

    code, status = "invalid-key", 400


class InvalidFrame(RequestRefused, ValueError):
    """The bytes are not one whole frame: wrong magic, length, offset or digest."""

    code, status = "invalid-frame", 400


class InvalidManifest(RequestRefused, ValueError):
    """The manifest breaks a rule of the format page."""

    code, status = "invalid-manifest", 400


class Unauthorized(RequestRefused):
    """There is no token, or it is not a known one."""

    code, status = "unauthorized", 401


class Forbidden(RequestRefused):
    """The token does not reach this run or this kind of access."""

    code, status = "forbidden", 403


class NotFound(RequestRefused, LookupError):
    """There is no such bundle, leaf, program or route (any more)."""

    code, status = "not-found", 404


class MethodNotAllowed(RequestRefused):
    """The route exists, the method does not."""

    code, status = "method-not-allowed", 405


class NotAcceptable(RequestRefused):
    """The answer cannot be given in the form that was asked for."""

    code, status = "not-acceptable", 406


class AlreadyExists(RequestRefused):
    """Another bundle stands under this key and ``if_exists`` forbids to replace it."""

    code, status = "already-exists", 409


class SegmentUnavailable(RequestRefused):
    """A segment cannot be lent, or is lent no more; the bytes can always travel in the body."""

    code, status = "segment-unavailable", 410


class LeafNotHeld(RequestRefused, LookupError):
    """A bundle leaves out the bytes of a leaf that its run does not hold any more; ``leaf`` names it."""

    code, status = "leaf-not-held", 412


class TooLarge(RequestRefused, ValueError):
    """The request is above a limit of the settings table."""

    code, status = "too-large", 413


class UnsupportedMedia(RequestRefused):
    """The body has a content type or content encoding that this route does not take."""

    code, status = "unsupported-media", 415


class RangeNotSatisfiable(RequestRefused):
    """The byte range lies outside the leaf."""

    code, status = "range-not-satisfiable", 416


class InvalidOption(RequestRefused, ValueError):
    """A query parameter or keyword option has a value that makes no sense here."""

    code, status = "invalid-option", 422


class StoreUnavailable(ResidualStoreError):
    """The request is right and may work later."""


class UploadStalled(StoreUnavailable, TimeoutError):
    """The body stopped coming; what had come was discarded."""

    code, status = "upload-stalled", 408


class Busy(StoreUnavailable):
    """Too many bytes are in flight just now; ``retry_after`` says when to try again, in seconds."""

    code, status = "busy", 429


class Stopping(StoreUnavailable):
    """The server is stopping and takes no new work."""

    code, status = "stopping", 503


class StoreFull(StoreUnavailable):
    """There is no room; ``needed_bytes`` and ``free_bytes`` say how much is missing."""

    code, status = "store-full", 507


class Unreachable(StoreUnavailable, ConnectionError):
    """The server did not answer, or the connection broke and the request could not be repeated."""

    code = "unreachable"


class TransferStalled(StoreUnavailable, TimeoutError):
    """A transfer was waited for, and nothing moved; ``key``, ``phase`` and ``limit`` (seconds) say where and for how long."""

    code = "transfer-stalled"


class StoreBroken(ResidualStoreError):
    """The store cannot keep its promise."""


class InternalError(StoreBroken):
    """A fault of the server; its log has the cause."""

    code, status = "internal", 500


class DataLoss(StoreBroken):
    """Stored bytes are missing or are not what was written; ``leaf`` names the first such leaf."""

    code, status = "data-loss", 500


class GradientRefused(ResidualStoreError):
    """Going on could give a wrong gradient, so nothing was done."""


class LeafUnavailable(GradientRefused, ValueError):
    """A leaf cannot be read: it was deleted or donated, is being traced, or lies on another process."""

    code = "leaf-unavailable"


class LeafMismatch(GradientRefused, ValueError):
    """A leaf of the VJP object is not what its backward was traced for."""

    code = "leaf-mismatch"


class BundleReplaced(GradientRefused, ValueError):
    """Under the key is another bundle than that of the handle, or one that was first put under another key."""

    code = "bundle-replaced"


class ProgramMismatch(GradientRefused, ValueError):
    """The bundle belongs to another backward program than the one it is restored into."""

    code = "program-mismatch"


class ProgramUnavailable(GradientRefused, LookupError):
    """There is no backward program to apply: none was stored, or none is known in this process."""

    code = "program-unavailable"


class ArgumentMismatch(GradientRefused, ValueError):
    """``args`` differs from the recorded arguments in tree, count, shape, dtype or content."""

    code = "argument-mismatch"


class CotangentMismatch(GradientRefused, ValueError):
    """The cotangent differs from the recorded output in tree, count, shape or dtype."""

    code = "cotangent-mismatch"


class PrecisionMismatch(GradientRefused, ValueError):
    """The bundle holds 64-bit values and this process has ``jax_enable_x64`` off."""

    code = "precision-mismatch"


class MeshMismatch(GradientRefused, ValueError):
    """The bundle was made on a device mesh that this process cannot build."""

    code = "mesh-mismatch"


class MissingExtra(ResidualStoreError, ImportError):
    """A part of the package was used whose optional dependencies are not installed."""

    code = "missing-extra"

    @classmethod
    def of(cls, extra: str, *, part: str, missing: str | None) -> MissingExtra:
        """The error for ``part``, which needs the extra named ``extra``."""
        text = f"{part} needs {missing or 'a package'}; pip install 'residual-store[{extra}]'"
        return cls(text, extra=extra)


ERRORS: Mapping[str, type[ResidualStoreError]] = {
    kind.code: kind
    for kind in list(vars().values())
    if isinstance(kind, type) and issubclass(kind, ResidualStoreError) and "code" in vars(kind)
    if kind is not ResidualStoreError
}
"""Code -> class; ``ERRORS[code].status`` is the HTTP status, or None for an error that never crosses HTTP."""
