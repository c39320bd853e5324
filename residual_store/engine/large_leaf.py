"""Large leaves: those that the bundles of a run share, or that one has and others could share."""

from __future__ import annotations

from dataclasses import dataclass

from residual_store.key import run_of
from residual_store.manifest import Manifest
from residual_store.shared_leaf import SharedLeaf, is_shared_key

__all__ = ["LargeLeaf"]


@dataclass(frozen=True, kw_only=True)
class LargeLeaf:
    """A leaf that the run shares or could share: its number, and the key of a shared leaf with its content."""

    number: int
    shared_key: str
    is_shared: bool

    @classmethod
    def all_of(cls, key: str, manifest: Manifest, least: int) -> tuple[LargeLeaf, ...]:
        """Those of one bundle: all that are shared, and the raw and tiled ones of ``least`` bytes or more."""
        if is_shared_key(key):
            return ()
        # Most leaves are small, and of those the length alone says so.
        large = [leaf for leaf in manifest.leaves if leaf.nbytes >= least and leaf.is_large(least)]
        return tuple(
            cls(number=leaf.index, shared_key=SharedLeaf.of(leaf).key(run_of(key)), is_shared=leaf.is_shared)
            for leaf in [*manifest.shared, *large]
        )
