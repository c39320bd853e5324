"""Known offloads: those of a key whose arrays are still there, by which one that is made once more is known.

Each process counts the offloads of a key by itself, and parts with equal counts become one bundle.
So an offload that is repeated after a failure, in one process alone, must not count again, or parts of two steps would meet.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from residual_client.upload import Upload
from residual_store.errors import LeafUnavailable
from residual_store.manifest import Manifest
from residual_store.parts import ATTEMPT

__all__ = ["KnownOffloads", "Offload"]

_REMEMBERED_KEYS = 1024


@dataclass(eq=False)
class Offload:
    """One offload; the ``leaves`` are weak references, or values where there can be none.

    ``name`` is that of the attempt of several processes, None where this one has all.

    ``upload`` is what became of it; without one it came to nothing, unless it ``is_being_taken``.
    """

    name: str | None = None
    leaves: Sequence[Any] = ()
    upload: Upload | None = None
    is_being_taken: bool = True

    def named(self, manifest: Manifest) -> Manifest:
        """The manifest with the name."""
        if self.name is None:
            return manifest
        return replace(manifest, user={**manifest.user, ATTEMPT: self.name})

    @property
    def is_lost(self) -> bool:
        """Whether its part is not in the store, and nobody is about to put it there."""
        if self.upload is None:
            return not self.is_being_taken
        return self.upload.state == "failed"

    @property
    def is_alive(self) -> bool:
        """Whether it can be made once more."""
        return not any(isinstance(leaf, weakref.ref) and leaf() is None for leaf in self.leaves)

    def is_of(self, values: Sequence[Any]) -> bool:
        """Whether these are its leaves, the very same arrays."""
        pairs = zip(self.leaves, values, strict=False)
        return len(self.leaves) == len(values) and all(_is_same(leaf, value) for leaf, value in pairs)


def _is_same(leaf: Any, value: Any) -> bool:
    if isinstance(leaf, weakref.ref):
        return leaf() is value
    return type(leaf) is type(value) and bool(leaf == value)


def _referred(value: Any) -> Any:
    try:
        return weakref.ref(value)
    except TypeError:
        return value


class KnownOffloads:
    """The offloads of each key that can be made once more, and those that came to nothing.

    >>> known, array = KnownOffloads(), np.ones(3)
    >>> _ = known.note("run/a", "name-1", [array])
    >>> known.find("run/a", [array]).name, known.find("run/a", [np.ones(3)])
    ('name-1', None)
    """

    def __init__(self) -> None:
        self._of_key = OrderedDict[str, list[Offload]]()
        self._lost: set[str] = set()

    def find(self, key: str, values: Sequence[Any]) -> Offload | None:
        """The earlier offload with these leaves, if this is it once more; raises `LeafUnavailable` if another one is lost."""
        known = [one for one in self._of_key.get(key, ()) if one.is_lost or one.is_alive]
        for offload in known:
            if offload.is_of(values):
                return offload
        if key in self._lost or any(one.is_lost for one in known):
            raise LeafUnavailable(
                f"an earlier offload of {key!r} by this process came to nothing, and this is another VJP object, so parts "
                "of two steps could become one bundle; offload that one once more, choose another key, or connect anew in "
                "every process",
                key=key,
            )
        return None

    def note(self, key: str, name: str, values: Sequence[Any]) -> Offload:
        """Remember a new one."""
        offload = Offload(name, [_referred(value) for value in values])
        others = [one for one in self._of_key.pop(key, ()) if one.is_alive]
        self._of_key[key] = [*others, offload]
        if len(self._of_key) > _REMEMBERED_KEYS:
            oldest, offloads = self._of_key.popitem(last=False)
            if any(one.is_lost for one in offloads):
                self._lost.add(oldest)
        return offload
