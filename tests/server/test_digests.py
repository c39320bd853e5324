"""``/v1/digests``: what it refuses, and that a frame without the bytes of a leaf is a put like others."""

from __future__ import annotations

import json

import numpy as np
import pytest

from residual_store import Bundle, open_store
from residual_store.shared_leaf import SharedLeaf, with_shared
from tests.server.raw import ask, frame_of
from tests.servers import Server, running_server, start_server, until
from tests.store.bundles import assert_equal

_JSON = {"Content-Type": "application/json"}
_LEAF = {"digest": "0" * 32, "dtype": "float32", "shape": [2]}


def _ask(server: Server, body: object, target: str = "/v1/digests?run=exp1") -> tuple[int, object]:
    answer = ask(server.url, "POST", target, body=json.dumps(body).encode(), headers=_JSON)
    return answer.status, answer.json


@pytest.mark.parametrize(
    "leaf",
    [
        {**_LEAF, "digest": "../../../../etc"},
        {**_LEAF, "digest": "0" * 33},
        {**_LEAF, "dtype": "object"},
        {**_LEAF, "shape": [-1]},
        {**_LEAF, "shape": [1] * 33},
        {**_LEAF, "more": 1},
        {"digest": "0" * 32},
        7,
    ],
)
def test_what_names_no_leaf_is_refused(memory_server: Server, leaf: object) -> None:
    """A digest that is none could lead anywhere on a disk."""
    status, problem = _ask(memory_server, [_LEAF, leaf])
    assert (status, problem["code"]) == (422, "invalid-option")  # type: ignore[index]


def test_a_run_and_a_list_are_wanted(memory_server: Server) -> None:
    """An empty list is one."""
    assert _ask(memory_server, []) == (200, {"held": []})
    assert _ask(memory_server, [_LEAF]) == (200, {"held": [False]})
    assert _ask(memory_server, _LEAF)[0] == 422
    assert _ask(memory_server, [_LEAF], "/v1/digests?run=exp1/a")[0] == 400
    assert _ask(memory_server, [_LEAF], "/v1/digests?run=~shared")[0] == 400
    assert _ask(memory_server, [_LEAF] * 65_537)[0] == 413


def test_no_key_reaches_a_shared_leaf(memory_server: Server) -> None:
    """Its own key is none for a caller."""
    key = SharedLeaf(digest="0" * 32, dtype="float32", shape=(2,)).key("exp1")
    for method in ("GET", "HEAD", "PUT", "DELETE"):
        body = frame_of(Bundle.of_arrays({})) if method == "PUT" else None
        assert ask(memory_server.url, method, f"/v1/bundles/{key}", body=body).status == 400


def test_a_put_without_a_leaf_is_refused_before_its_body(memory_server: Server) -> None:
    """412 and the leaf, for what the run does not hold."""
    bundle = Bundle.of_arrays({"W": np.arange(1000.0), "x": np.arange(7.0)}).sealed()
    frame = frame_of(with_shared(bundle, [0]))
    answer = ask(memory_server.url, "PUT", "/v1/bundles/digests/a", body=frame)
    assert (answer.status, answer.json["code"], answer.json["leaf"]) == (412, "leaf-not-held", "W")


def test_a_shared_leaf_is_mapped_too(memory_server: Server) -> None:
    """Two gets of different bundles show the same memory of the server, through shared memory."""
    weights = np.random.default_rng(0).random(1 << 20)
    bundles = [Bundle.of_arrays({"x": np.arange(1e6) + i, "W": weights}).sealed() for i in range(3)]
    with open_store(memory_server.url) as store:
        store.put("mapped/0", bundles[0])
        (held,) = store.held("mapped", [SharedLeaf.of(bundles[0].manifest.leaves[1])])
        assert held
        for i in (1, 2):
            assert store.put(f"mapped/{i}", with_shared(bundles[i], [1])).transport == "segment"
        one, two = store.get("mapped/1"), store.get("mapped/2")
        assert_equal(one, bundles[1])
        assert_equal(two, bundles[2])
        assert one.payloads[1].ctypes.data == two.payloads[1].ctypes.data
        store.delete_prefix("mapped/")
        assert_equal(one, bundles[1])


def test_a_killed_server_keeps_no_leaf_that_nobody_has(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Killed between the shared leaf and the bundle that asked for it, it collects the leaf in the next life."""
    root = tmp_path_factory.mktemp("root")
    environment = {"RESIDUAL_STORE_DEDUP_SECONDS": "0.2", "RESIDUAL_STORE_SWEEP_SECONDS": "0.1"}
    bundle = Bundle.of_arrays({"W": np.random.default_rng(0).random(1 << 18)}).sealed()
    leaf = SharedLeaf.of(bundle.manifest.leaves[0])
    server = start_server(root=root, environment=environment | {"RESIDUAL_STORE_SWEEP_SECONDS": "1000"})
    with open_store(server.url) as store:
        store.put("exp1/a", bundle)
        assert store.held("exp1", [leaf]) == (True,)
    server.process.kill()
    server.wait()
    with running_server(root=root, environment=environment) as server, open_store(server.url) as store:
        until(lambda: [run.nbytes for run in store.usage().runs] == [bundle.manifest.nbytes])
        assert_equal(store.get("exp1/a"), bundle)
    assert len(list(root.glob("bundles/**/manifest.ocdbt"))) == 1
