"""Known offloads: those of a key that are not stored yet or never will be, by which one that is made once more is known.

Each process counts the offloads of a key by itself, and parts with equal counts become one bundle.
So an offload that one process alone repeats after a failure must not count again, or parts of two steps would meet.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass, replace

import jax

from residual_client.upload import Upload
from residual_store.errors import LeafUnavailable
from residual_store.manifest import Manifest
from residual_store.parts import ATTEMPT

__all__ = ["KnownOffloads", "Offload"]


@dataclass(eq=False)
class Offload:
    """One offload of a key, from its call on.

    ``name`` is that of the attempt of several processes, None where this one has all.
    ``arrays`` are its leaves that are arrays of JAX, which nobody can change.
    ``upload`` is what became of it; without one it came to nothing, unless it ``is_being_taken``.
    """

    key: str = ""
    name: str | None = None
    arrays: Sequence[weakref.ref[jax.Array]] = ()
    manifest: Manifest | None = None
    upload: Upload | None = None
    is_being_taken: bool = True

    @property
    def is_lost(self) -> bool:
        """Whether its part may not be in the store, and somebody was or will be told so."""
        if self.upload is None:
            return not self.is_being_taken
        return self.upload.state == "failed" or self.upload.was_given_up

    @property
    def is_settled(self) -> bool:
        """Whether it is stored, or was deleted before, and can be forgotten."""
        return self.upload is not None and not self.upload.pending and not self.is_lost

    def is_of(self, values: Sequence[object]) -> bool:
        """Whether these have the very same arrays."""
        arrays = [value for value in values if isinstance(value, jax.Array)]
        return len(self.arrays) == len(arrays) and all(
            known() is array for known, array in zip(self.arrays, arrays, strict=True)
        )

    def named(self, manifest: Manifest) -> Manifest:
        """The manifest with the name; raises `LeafUnavailable` if this is another VJP object than that of the first call."""
        if self.name is None:
            return manifest
        named = replace(manifest, user={**manifest.user, ATTEMPT: self.name})
        if self.manifest is not None and replace(named, created=0.0) != replace(self.manifest, created=0.0):
            raise _another(self.key)
        self.manifest = named
        return named


def _another(key: str) -> LeafUnavailable:
    return LeafUnavailable(
        f"an earlier offload of {key!r} by this process came to nothing, and this is another VJP object, so parts of two "
        "steps could become one bundle; offload that one once more, choose another key, or connect anew in every process",
        key=key,
    )


class KnownOffloads:
    """The offloads of each key that are not settled.

    >>> known, array = KnownOffloads(), jnp.ones(3)
    >>> offload = known.note("run/a", "name-1", [array])
    >>> offload.is_being_taken = False
    >>> known.lost("run/a", [array]).name
    'name-1'
    """

    def __init__(self) -> None:
        self._of_key: dict[str, list[Offload]] = {}

    def lost(self, key: str, values: Sequence[object]) -> Offload | None:
        """The lost offload of a key that is made once more, or None if none is lost.

        Raises `LeafUnavailable` if it is another one that is made now.
        """
        lost = [one for one in self._of_key.get(key, ()) if one.is_lost]
        for offload in lost:
            if offload.is_of(values):
                return offload
        if lost:
            raise _another(key)
        return None

    def note(self, key: str, name: str, values: Sequence[object]) -> Offload:
        """Remember a new one."""
        self._forget_settled()
        arrays = [weakref.ref(value) for value in values if isinstance(value, jax.Array)]
        offload = Offload(key=key, name=name, arrays=arrays)
        self._of_key.setdefault(key, []).append(offload)
        return offload

    def _forget_settled(self) -> None:
        for key, offloads in list(self._of_key.items()):
            offloads[:] = [one for one in offloads if not one.is_settled]
            if not offloads:
                del self._of_key[key]
