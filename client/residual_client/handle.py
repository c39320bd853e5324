"""A handle: the small reference that stands for an offloaded VJP object."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from jax.sharding import Sharding

from residual_store.errors import InvalidOption
from residual_store.store import Receipt

__all__ = ["Handle", "Local"]


@dataclass(frozen=True)
class Local:
    """What only the process that made the offload has: the treedef, and where each leaf was."""

    treedef: Any
    placements: Sequence[Sharding | None]


@dataclass(frozen=True, kw_only=True, eq=False)
class Handle:
    """A reference to one offloaded VJP object.

    ``digest`` names the stored bytes, so a handle never restores what somebody put in their place.
    A ``scratch`` bundle has no name of its own and no ``fingerprint``; it belongs to this handle alone.
    In the process that made it, a handle restores without ``like``; written as JSON it can travel.

    >>> handle = client.offload(f_vjp, "exp1/step-12/layer-3")
    >>> Handle.from_json(handle.to_json()).key
    'exp1/step-12/layer-3'
    """

    key: str
    digest: str
    fingerprint: str | None
    scratch: bool = False
    receipt: Receipt | None = field(default=None, repr=False)
    local: Local | None = field(default=None, repr=False)

    def wait(self) -> Receipt:
        """The receipt, once the bundle is stored.

        Raises `InvalidOption` for a handle that came from another process, which has no receipt.
        """
        if self.receipt is None:
            raise InvalidOption("this handle was made in another process, so the receipt is there")
        return self.receipt

    def to_json(self) -> str:
        """The handle as text for another process; raises `InvalidOption` for a scratch bundle."""
        if self.scratch:
            raise InvalidOption(
                "a scratch bundle can be restored only in the process that made it; pass a key to offload to name it"
            )
        return json.dumps({"key": self.key, "digest": self.digest, "fingerprint": self.fingerprint})

    @classmethod
    def from_json(cls, text: str) -> Handle:
        """The handle that `to_json` wrote; raises `InvalidOption`, a ValueError, for other text."""
        try:
            content = json.loads(text)
            values = {name: content[name] for name in ("key", "digest", "fingerprint")}
        except (ValueError, TypeError, LookupError) as error:
            raise InvalidOption(f"this is not a handle as to_json writes it: {error}") from error
        if not all(isinstance(value, str | None) for value in values.values()) or None in (
            values["key"],
            values["digest"],
        ):
            raise InvalidOption("this is not a handle as to_json writes it: key and digest are texts")
        return cls(**values)
