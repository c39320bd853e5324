"""Known offloads: which is a lost one once more, and what is refused after one that was lost."""

from __future__ import annotations

import gc
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from residual_client.known_offloads import KnownOffloads, Offload
from residual_client.motion import Motion
from residual_client.upload import State, Upload
from residual_store import Bundle, Manifest, Receipt
from residual_store.errors import LeafUnavailable

_RECEIPT = Receipt(key="run/a", leaves=1, array_nbytes=1, nbytes=1, tier="host", durability="host")


def _noted(known: KnownOffloads, leaves: list[Any], state: State | None) -> Offload:
    """An offload that has become an upload in this state, or none."""
    offload = known.note("run/a", "name-1", leaves)
    offload.is_being_taken = False
    if state is not None:
        offload.upload = _upload()
        offload.upload.state = state
    return offload


def _upload() -> Upload:
    def put(bundle: Bundle, moved: Any) -> Any:
        raise NotImplementedError

    return Upload(
        "run/a", named=True, nbytes=1, encode=lambda: Bundle.of_arrays({}), put=put, motion=Motion(limit=1)
    )


@pytest.mark.parametrize("state", [None, "failed"])
def test_a_lost_one_is_known_by_its_arrays(state: State | None) -> None:
    """By identity and not by value, and whatever else is among its leaves."""
    known, leaves = KnownOffloads(), [jnp.ones(3), np.ones(3), 2, jnp.zeros(2)]
    offload = _noted(known, leaves, state)
    assert known.lost("run/a", [leaves[0], np.zeros(3), 3, leaves[3]]) is offload
    assert known.lost("run/b", [jnp.ones(3)]) is None
    for other in ([jnp.ones(3), *leaves[1:]], leaves[:3], [*leaves, jnp.ones(1)], [leaves[3], leaves[0]]):
        with pytest.raises(LeafUnavailable, match="'run/a' by this process came to nothing"):
            known.lost("run/a", other)


@pytest.mark.parametrize("state", ["queued", "sending", "stored", "withdrawn"])
def test_one_that_is_not_lost_stands_in_nobodys_way(state: State) -> None:
    """The same arrays are the next offload then, in every process alike; lost is what somebody was told to have stalled."""
    known, leaves = KnownOffloads(), [jnp.ones(3)]
    offload = _noted(known, leaves, state)
    assert known.lost("run/a", leaves) is None
    assert offload.upload is not None
    offload.upload.stalled()
    assert known.lost("run/a", leaves) is offload


def test_one_that_stalled_and_was_stored_is_not_lost() -> None:
    """Whoever waits for it once more is told so."""
    known, leaves = KnownOffloads(), [jnp.ones(3)]
    offload = _noted(known, leaves, "sending")
    upload = offload.upload
    assert upload is not None
    upload.stalled()
    upload.state, upload.receipt = "stored", _RECEIPT
    assert known.lost("run/a", leaves) is offload
    assert upload.wait() is _RECEIPT
    assert known.lost("run/a", leaves) is None


def test_one_that_is_lost_late_is_not_forgotten() -> None:
    """Its arrays may be gone and many others offloaded since; once it is stored it is."""
    known = KnownOffloads()
    offload = _noted(known, [jnp.ones(3)], "sending")
    gc.collect()
    for number in range(2000):
        known.note(f"run/{number}", "name", [jnp.ones(1)])
    assert offload.upload is not None
    offload.upload.state = "failed"
    with pytest.raises(LeafUnavailable, match="'run/a'"):
        known.lost("run/a", [jnp.ones(3)])
    offload.upload.state = "stored"
    assert known.lost("run/a", [jnp.ones(3)]) is None


def test_the_same_arrays_in_another_program_are_another_offload() -> None:
    """What the manifest says must be what it was, but for the time."""
    known = KnownOffloads()
    offload = _noted(known, [jnp.ones(3)], None)
    assert offload.named(Manifest(function="f", created=1.0)).user == {"residual-store.attempt": "name-1"}
    assert offload.named(Manifest(function="f", created=2.0)).function == "f"
    with pytest.raises(LeafUnavailable, match="'run/a'"):
        offload.named(Manifest(function="g"))
