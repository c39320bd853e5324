"""Two processes with two devices each, under `jax.distributed`, store one bundle together."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import residual_client as rc
from residual_store import open_store
from residual_store.errors import MeshMismatch, NotFound
from tests.client.parts_child import backward, forward, shards_of
from tests.servers import Server, running_server, until

_REPOSITORY = Path(__file__).parents[2]


def _run_two(url: str, key: str, *rest: str) -> list[tuple[int, str]]:
    """Exit status and output of both processes."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    environment = {**os.environ, "XLA_FLAGS": "--xla_force_host_platform_device_count=2"}
    command = [sys.executable, "-m", "tests.client.parts_child", port]
    processes = [
        subprocess.Popen(
            [*command, str(index), url, key, *rest],
            cwd=_REPOSITORY,
            env=environment,
            stdout=subprocess.PIPE,
            text=True,
        )
        for index in range(2)
    ]
    try:
        return [(process.wait(240), process.communicate()[0]) for process in processes]
    finally:
        for process in processes:
            process.kill()


@pytest.fixture(scope="module", params=["http", "segment", "file"])
def stored(
    request: pytest.FixtureRequest,
    memory_server: Server,
    mapped_server: Server,
    tmp_path_factory: pytest.TempPathFactory,
) -> tuple[str, list[dict[str, Any]]]:
    """Where the two have stored their bundles, and what each reports."""
    root = tmp_path_factory.mktemp("parts").as_uri()
    url = {"http": memory_server.url, "segment": mapped_server.url, "file": root}[request.param]
    ends = _run_two(url, "several/a")
    assert [status for status, _ in ends] == [0, 0]
    return url, [json.loads(out.splitlines()[-1]) for _, out in ends]


def test_each_process_gets_its_shards_back(stored: tuple[str, list[dict[str, Any]]]) -> None:
    """Same bits, shardings and gradients in both processes, for a replicated weight, rows, keys and `shard_map` residuals.

    A replicated leaf is stored by one of them only, and a step later the same key can be replaced.
    What is refused of a part is raised where it would be of a whole bundle: at a flush, and at a restore of its handle.
    """
    _, reports = stored
    for report in reports:
        for name in ("layer", "mapped"):
            held = {what: kept for what, kept in report[name].items() if what.startswith("same")}
            assert held == {"same bits": True, "same shardings": True, "same gradients": True}
            for late in ("flush", "restore"):
                assert report[name][late].startswith(
                    "already-exists: another bundle is stored under 'several/a"
                )
        assert "pass a key to offload" in report["layer"]["scratch"]
    sizes = [report["layer"]["received"] for report in reports]
    assert sizes[0] > sizes[1]


def test_an_offload_that_is_repeated_by_one_process_meets_its_own_parts(
    stored: tuple[str, list[dict[str, Any]]],
) -> None:
    """After a failure in one process, the same VJP object is the same step, and another one is refused by name."""
    _, reports = stored
    first, other = (report["repeated"] for report in reports)
    assert first.pop("refusal").startswith("store-full")
    assert "an earlier offload of 'several/a-r' by this process came to nothing" in first.pop("another")
    assert first == other == {"first": True, "second": True}


def test_one_process_restores_it_on_as_many_devices(stored: tuple[str, list[dict[str, Any]]]) -> None:
    """A mesh of the same shape out of the devices of one process: bit-equal leaves and gradients."""
    url, _ = stored
    y, like = forward(jax.devices())
    with rc.connect(url) as client:
        restored = client.restore("several/a", like=like)
        assert shards_of(restored) == shards_of(like)
        assert [one.sharding for one in jax.tree.leaves(restored)] == [
            one.sharding for one in jax.tree.leaves(like)
        ]
        assert shards_of(backward(restored, y)) == shards_of(backward(like, y))


def test_two_devices_and_one_get_the_same_numbers(stored: tuple[str, list[dict[str, Any]]]) -> None:
    """Onto the mesh of ``like`` where its program is the same, else as numpy; every leaf is equal."""
    url, _ = stored
    y, like = forward(jax.devices())
    wanted = [np.asarray(one) for one in backward(like, y)]
    with rc.connect(url) as client:
        bundle = client.store.get("several/a")
        y_two, two = forward(jax.devices()[2:])
        restored = client.restore("several/a", like=two)
        assert {len(one.sharding.device_set) for one in jax.tree.leaves(restored)} == {2}
        plain = client.restore("several/a", like=like, as_numpy=True)
        for index, (one, other) in enumerate(
            zip(jax.tree.leaves(restored), jax.tree.leaves(plain), strict=True)
        ):
            if bundle.manifest.leaves[index].kind == "array":
                assert isinstance(other, np.ndarray)
                assert np.asarray(one).tobytes() == other.tobytes() == bundle.array(index).tobytes()
        for gradients in (backward(restored, y_two), backward(plain, np.asarray(y))):
            for one, other in zip(gradients, wanted, strict=True):
                np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)


def test_another_mesh_is_refused_with_both_named(stored: tuple[str, list[dict[str, Any]]]) -> None:
    """A `shard_map` residual is cut for its mesh, so two devices cannot take what four have made."""
    url, _ = stored
    with (
        rc.connect(url) as client,
        pytest.raises(MeshMismatch, match=r"made on mesh\(i=4\) and the VJP object given is on mesh\(i=2\)"),
    ):
        client.restore("several/a-m", like=forward(jax.devices()[:2], mapped=True)[1])


def test_without_the_other_part_nothing_is_seen_and_it_expires(tmp_path: Path) -> None:
    """One process dies before its part: no get, stat or list shows the bundle, and the part is gone after its lease."""
    brief = {"RESIDUAL_STORE_PART_TTL_SECONDS": "1", "RESIDUAL_STORE_SWEEP_SECONDS": "0.1"}
    with running_server(root=tmp_path, environment=brief) as server, open_store(server.url) as store:
        assert [status for status, _ in _run_two(server.url, "several/dead", "die")] == [9, 9]
        with pytest.raises(NotFound):
            store.stat("several/dead")
        with pytest.raises(NotFound):
            store.get("several/dead", wait=0.1)
        assert store.list().entries == ()
        until(lambda: store.usage().expired == 1, what="the end of the part's lease")
        assert not list(tmp_path.glob("parts/bundles/**/@*"))
