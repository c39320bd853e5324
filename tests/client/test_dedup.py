"""Deduplication: weights in the residuals travel once for each run, and gradients do not notice."""

from __future__ import annotations

import gc
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import residual_client as rc
from residual_client.client import Client
from residual_store import Settings
from residual_store.engine.local import LocalStore
from tests.client.bits import bits_of
from tests.client.captured import MODELS, WEIGHT_BYTES, forward_of, microbatch

_MICROBATCHES = 8


class _Asked(LocalStore):
    """A store that notes what it is asked for."""

    asked: list[int]
    forgets = False

    def held(self, run: str, leaves: Any, *, durability: Any = None) -> tuple[bool, ...]:
        self.asked.append(len(leaves))
        answer = super().held(run, leaves, durability=durability)
        if self.forgets:
            self.delete_prefix(f"{run}/")
        return answer


@pytest.fixture
def store() -> _Asked:
    store = _Asked.in_memory(settings=Settings())
    store.asked = []
    return store


@pytest.mark.parametrize("name", MODELS)
def test_weights_travel_once(any_client: rc.Client, name: str) -> None:
    """Eight microbatches: the bytes sent are those of the activations, and of the weights once; gradients are bit-equal."""
    forward = jax.jit(forward_of(name))
    live, handles = [], []
    for number in range(_MICROBATCHES):
        y, f_vjp = forward(microbatch(number))
        live.append((y, f_vjp))
        handles.append(any_client.offload(f_vjp, f"test/{name}/{number}"))
    receipts = [handle.wait() for handle in handles]
    # They are sent a few at a time, and whichever is first brings the weights.
    saved = [receipt.saved_bytes.get("shared", 0) for receipt in receipts]
    assert sorted(saved) == [0, *[WEIGHT_BYTES[name]] * 7]
    first = saved.index(0)
    activations = receipts[first].nbytes - WEIGHT_BYTES[name]
    assert activations > 0
    sent = sum(receipt.nbytes for receipt in receipts)
    assert sent <= (_MICROBATCHES * activations + WEIGHT_BYTES[name]) * 1.01
    any_client.delete(handles.pop(first))
    live.pop(first)
    for handle, (y, f_vjp) in list(zip(handles, live, strict=True))[::-1]:
        assert bits_of(any_client.restore(handle)(y)) == bits_of(f_vjp(y))


def test_explain_says_what_the_run_holds_already(any_client: rc.Client) -> None:
    """Leaf by leaf and in all, as the receipt of the offload then does; another run holds nothing."""
    forward = jax.jit(forward_of("captured"))
    any_client.offload(forward(microbatch(0))[1], "explained/0").wait()
    _, f_vjp = forward(microbatch(1))
    explanation = any_client.explain(f_vjp, run="explained")
    notes = [one.note for one in explanation.leaves if one.is_shared]
    assert len(notes) == 2
    assert all("already in the run: not sent again" in note for note in notes)
    assert "8.0 MiB already in the run: not sent again" in explanation.summary
    for other in (any_client.explain(f_vjp, run="elsewhere"), any_client.explain(f_vjp)):
        assert not any(one.is_shared for one in other.leaves)
        assert other.sent == explanation.sent + WEIGHT_BYTES["captured"]
    receipt = any_client.offload(f_vjp, "explained/1").wait()
    assert (explanation.sent, explanation.saved_bytes) == (receipt.nbytes, receipt.saved_bytes)
    assert receipt.saved_bytes["shared"] == WEIGHT_BYTES["captured"]


def test_explain_says_that_shards_are_equal(any_client: rc.Client) -> None:
    """Weights captured below shard_map are sent once, and not again when the run holds them, as the receipt then says."""
    forward = jax.jit(forward_of("shard_map"))
    _, f_vjp = forward(microbatch(0))
    weights = WEIGHT_BYTES["shard_map"]
    explanation = any_client.explain(f_vjp, run="test")
    assert explanation.saved_bytes["tiled"] == weights
    assert sum(one.note.endswith("2 equal shards") for one in explanation.leaves) == 2
    receipt = any_client.offload(f_vjp, "test/0").wait()
    assert (explanation.sent, explanation.saved_bytes) == (receipt.nbytes, receipt.saved_bytes)
    explanation = any_client.explain(forward(microbatch(1))[1], run="test")
    assert (explanation.saved_bytes["tiled"], explanation.saved_bytes["shared"]) == (weights, weights)
    assert explanation.sent == receipt.nbytes - weights
    notes = [one.note for one in explanation.leaves if one.is_shared]
    assert len(notes) == 2
    assert all("already in the run: not sent again, 2 equal shards" in note for note in notes)


def test_one_device_and_several_share_their_weights(any_client: rc.Client) -> None:
    """A weight that one device saves whole and two devices as equal shards is sent once for both, in either order."""
    models = [jax.jit(forward_of(name)) for name in ("captured", "shard_map")]
    for run, order in (("test/a", models), ("other/a", models[::-1])):
        outcomes = [forward(microbatch(number)) for number, forward in enumerate(order)]
        handles = []
        for number, (_, f_vjp) in enumerate(outcomes):
            handles.append(any_client.offload(f_vjp, f"{run}/{number}"))
            saved = handles[-1].wait().saved_bytes
            assert saved.get("shared", 0) == number * WEIGHT_BYTES["captured"]
        for handle, (y, f_vjp) in zip(handles, outcomes, strict=True):
            assert bits_of(any_client.restore(handle)(y)) == bits_of(f_vjp(y))
    any_client.store.delete_prefix("other/")


@pytest.mark.parametrize("kind", ["http", "file"])
def test_another_process_does_not_send_them_again(
    kind: str, tmp_path: Path, memory_server: Any, request: pytest.FixtureRequest
) -> None:
    """It asks before it sends, although it has put nothing itself."""
    url = memory_server.url if kind == "http" else tmp_path.as_uri()
    with rc.connect(url) as client:
        _, f_vjp = jax.jit(forward_of("captured"))(microbatch(0))
        first = client.offload(f_vjp, "processes/0").wait().nbytes
        command = [sys.executable, "-m", "tests.client.dedup_child", url, "processes/1", "1"]
        second = int(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
        assert second == first - WEIGHT_BYTES["captured"]
        client.store.delete_prefix("processes/")


def test_one_request_and_none_for_what_is_new(store: _Asked, monkeypatch: pytest.MonkeyPatch) -> None:
    """All leaves of an offload are asked for at once, and leaves that were never seen only while that is not in vain."""
    monkeypatch.setattr("residual_client.known_leaves._IN_VAIN_BYTES", 0)
    forward = jax.jit(forward_of("captured"))
    with Client(store) as client:
        for number in range(3):
            client.offload(forward(microbatch(number))[1], f"run/{number}").wait()
        # The first is asked for all that is large; the others for the two weights, which this client has put.
        assert len(store.asked) == 3
        assert store.asked[1:] == [2, 2]
        before = len(store.asked)
        new = jax.jit(lambda x: jax.vjp(jnp.sin, x))
        for number in range(40):
            _, f_vjp = new(jax.random.normal(jax.random.key(number), (1 << 19,)))
            client.offload(f_vjp, f"other/{number}").wait()
        assert 1 <= len(store.asked) - before <= 6


def test_what_is_gone_by_the_time_of_the_put_is_sent(store: _Asked) -> None:
    """The put is refused, and the client sends the whole bundle without a word."""
    forward = jax.jit(forward_of("captured"))
    with Client(store) as client:
        client.offload(forward(microbatch(0))[1], "run/0").wait()
        store.forgets = True
        y, f_vjp = forward(microbatch(1))
        handle = client.offload(f_vjp, "run/1")
        assert "shared" not in handle.wait().saved_bytes
        assert bits_of(client.restore(handle)(y)) == bits_of(f_vjp(y))


def test_a_number_of_a_dead_array_is_not_taken_for_it(store: _Asked) -> None:
    """Arrays that come and go at one address have digests of their own."""
    identity = jax.jit(lambda x: jax.vjp(lambda x: x * x, x))
    with Client(store) as client:
        for number in range(8):
            x = jnp.asarray(np.random.default_rng(number).random(1 << 18, dtype=np.float32))
            y, f_vjp = identity(x)
            handle = client.offload(f_vjp, f"run/{number}")
            assert bits_of(client.restore(handle)(y)) == bits_of(f_vjp(y))
            del x, y, f_vjp
            gc.collect()


def test_keys_and_repetitions_are_shared_like_others(any_client: rc.Client) -> None:
    """PRNG keys keep their kind, and a leaf with equal bytes and another dtype repeats the shared one."""
    keys = jax.random.split(jax.random.key(0), 1 << 17)
    bits = jax.random.bits(jax.random.key(1), (1 << 18,), jnp.uint32)

    @jax.custom_vjp
    def model(x: jax.Array) -> jax.Array:
        return jnp.sin(x)

    def forward(x: jax.Array) -> tuple[jax.Array, Any]:
        return model(x), (x, keys, bits, bits.astype(jnp.int32))

    def backward(saved: Any, g: jax.Array) -> tuple[jax.Array]:
        x, keys, one, other = saved
        return (g * x + jax.random.uniform(keys[0]) + one[3] % 7 + other[5] % 5,)

    model.defvjp(forward, backward)
    traced = jax.jit(lambda x: jax.vjp(model, x))
    for number in range(3):
        y, f_vjp = traced(jnp.arange(1.0 + number, 5.0 + number))
        handle = any_client.offload(f_vjp, f"test/keys/{number}")
        receipt = handle.wait()
        assert receipt.saved_bytes["alias"] == bits.nbytes
        assert receipt.saved_bytes.get("shared", 0) == (2 * bits.nbytes if number else 0)
        assert bits_of(any_client.restore(handle)(y)) == bits_of(f_vjp(y))
