"""Known offloads: what is the same offload once more, and what is refused after one that came to nothing."""

from __future__ import annotations

import gc
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from residual_client.known_offloads import KnownOffloads, Offload
from residual_store.errors import LeafUnavailable


def _begun(known: KnownOffloads, key: str, name: str, leaves: list[Any], *, lost: bool) -> Offload:
    offload = known.note(key, name, leaves)
    offload.is_being_taken = not lost
    return offload


def test_the_same_arrays_are_the_same_offload_and_others_with_equal_values_are_not() -> None:
    """Arrays of JAX and numpy by identity, numbers by their value and type; whatever has become of it."""
    leaves = [jnp.ones(3), np.ones(3), 2, 1.0]
    for lost in (True, False):
        known = KnownOffloads()
        offload = _begun(known, "run/a", "name", leaves, lost=lost)
        assert known.find("run/a", list(leaves)) is offload
        assert known.find("run/b", leaves) is None
    for other in ([jnp.ones(3), *leaves[1:]], [*leaves[:3], 1], leaves[:3], [*leaves, 1]):
        assert known.find("run/a", other) is None


def test_after_a_lost_one_no_other_is_taken_under_its_key() -> None:
    """Not even when its arrays are gone, or many keys later; other keys are."""
    known, array = KnownOffloads(), jnp.ones(3)
    _begun(known, "run/a", "name", [array], lost=True)
    with pytest.raises(LeafUnavailable, match="'run/a' by this process came to nothing"):
        known.find("run/a", [jnp.ones(3)])
    del array
    gc.collect()
    for number in range(2000):
        assert known.find(f"run/{number}", [number]) is None
        _begun(known, f"run/{number}", "name", [jnp.ones(1)], lost=False)
    with pytest.raises(LeafUnavailable, match="'run/a'"):
        known.find("run/a", [jnp.ones(3)])
