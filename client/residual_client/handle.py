"""A handle: the small reference that stands for an offloaded VJP object."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Self

from jax.sharding import Sharding
from jax.tree_util import tree_leaves, tree_structure

from residual_client.transfer import placement_of
from residual_client.upload import State, Upload
from residual_store.errors import InvalidOption
from residual_store.manifest import Manifest
from residual_store.parts import attempt_of
from residual_store.stat import digest_of_manifest
from residual_store.store import Receipt

__all__ = ["Handle", "Local"]


@dataclass(frozen=True, kw_only=True)
class Local:
    """What only the process that made the offload has.

    That is the treedef, where each leaf was, the upload, its number, and when the manifest was ``created``.
    """

    treedef: Any
    placements: Sequence[Sharding | None]
    upload: Upload
    number: int
    created: float

    @classmethod
    def of(cls, vjp: Any, upload: Upload, *, number: int, created: float) -> Self:
        """What this process has of the VJP object that the ``upload`` takes away."""
        placements = [placement_of(leaf) for leaf in tree_leaves(vjp)]
        return cls(
            treedef=tree_structure(vjp), placements=placements, upload=upload, number=number, created=created
        )


@dataclass(frozen=True, kw_only=True, eq=False)
class Handle:
    """A reference to one offloaded VJP object.

    A ``scratch`` bundle has no name of its own and no ``fingerprint``; it belongs to this handle alone.
    In the process that made it, a handle restores without ``like``; written as JSON it can travel.

    >>> handle = client.offload(f_vjp, "exp1/step-12/layer-3")
    >>> Handle.from_json(handle.to_json()).key
    'exp1/step-12/layer-3'
    >>> handle
    Handle('exp1/step-12/layer-3', stored)
    """

    key: str
    fingerprint: str | None
    scratch: bool = False
    local: Local | None = None
    known_digest: str | None = field(default=None, repr=False)

    def __repr__(self) -> str:
        return f"Handle({self.key!r}, {self.state})"

    @property
    def state(self) -> State:
        """What has become of the bundle so far.

        "queued" and "sending" are not stored yet, "failed" will not be, and "withdrawn" was deleted before it was stored.
        A handle from another process is that of a bundle that was "stored".
        """
        return "stored" if self.local is None else self.local.upload.state

    @property
    def digest(self) -> str:
        """The name of the stored bytes, so that a handle never restores what somebody put in their place; waits as `wait` does."""
        return self.known_digest if self.known_digest is not None else self.wait().digest

    @property
    def is_of_attempt(self) -> bool:
        """Whether `digest` is the name of an attempt of several processes, see `residual_store.parts`."""
        return "-" in self.digest

    def stands_for(self, manifest: Manifest) -> bool:
        """Whether a bundle is that of this handle; one of several processes is known by the name of their attempt."""
        return self.digest in (digest_of_manifest(manifest), attempt_of(manifest))

    def wait(self) -> Receipt:
        """The receipt, once the bundle is stored.

        Raises what kept it from being stored, `TransferStalled` if nothing moves for `stall_seconds`, and `InvalidOption`
        for a handle that came from another process, which has no receipt.
        """
        if self.local is None:
            raise InvalidOption("this handle was made in another process, so the receipt is there")
        return self.local.upload.wait()

    def to_json(self) -> str:
        """The handle as text for another process, once the bundle is stored, see `wait`.

        Raises `InvalidOption` for a scratch bundle.
        """
        if self.scratch:
            raise InvalidOption(
                "a scratch bundle can be restored only in the process that made it; pass a key to offload to name it"
            )
        if self.local is not None:
            self.wait()
        return json.dumps({"key": self.key, "digest": self.digest, "fingerprint": self.fingerprint})

    @classmethod
    def from_json(cls, text: str) -> Handle:
        """The handle that `to_json` wrote; raises `InvalidOption`, a ValueError, for other text."""
        try:
            content = json.loads(text)
            key, digest, fingerprint = (content[name] for name in ("key", "digest", "fingerprint"))
        except (ValueError, TypeError, LookupError) as error:
            raise InvalidOption(f"this is not a handle as to_json writes it: {error!r}") from error
        if not all(isinstance(value, str | None) for value in (key, digest, fingerprint)) or None in (
            key,
            digest,
        ):
            raise InvalidOption("this is not a handle as to_json writes it: key and digest are texts")
        return cls(key=key, known_digest=digest, fingerprint=fingerprint)
