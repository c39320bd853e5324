"""Reading a durable root with plain tensorstore, without this package's engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy.typing as npt
import tensorstore as ts

from residual_store import Bundle

__all__ = ["assert_stored", "stored_array"]


def stored_array(root: Path, key: str, path: str) -> npt.NDArray[Any]:
    """One array of the database of a bundle."""
    (generation,) = (root / "bundles" / key).glob("@*")
    base = {"driver": "ocdbt", "base": {"driver": "file", "path": f"{generation}/"}, "path": path}
    store = ts.open({"driver": "zarr3", "kvstore": base}, open=True, read=True).result()
    found: npt.NDArray[Any] = store.read().result()
    return found


def assert_stored(root: Path, key: str, bundle: Bundle, *, packed_below: int) -> None:
    """The bytes on disk are those of the bundle: large leaves as arrays of their own, the small ones packed."""
    packed = b""
    for leaf, payload in zip(bundle.manifest.leaves, bundle.payloads, strict=True):
        if leaf.nbytes >= packed_below:
            found = stored_array(root, key, f"leaves/{leaf.index}/")
            assert found.tobytes() == payload.tobytes(), leaf.path
            assert leaf.encoding != "raw" or found.shape == leaf.shape
        else:
            packed += payload.tobytes()
    if packed:
        assert stored_array(root, key, "packed/").tobytes() == packed
