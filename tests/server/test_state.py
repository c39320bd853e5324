"""The state of the service: alive, ready, how full, and the counters."""

from __future__ import annotations

import re
from pathlib import Path

from residual_store import Settings, open_store
from tests.server.raw import ask, frame_of
from tests.servers import Server, running_server, until
from tests.store.bundles import noise


def _metrics(url: str) -> dict[str, float]:
    lines = ask(url, "GET", "/metrics").body.decode().splitlines()
    return {
        name: float(number) for name, _, number in (line.rpartition(" ") for line in lines if line[:1] != "#")
    }


def test_a_server_is_alive_and_ready(memory_server: Server) -> None:
    """Both probes are 200 with JSON."""
    assert ask(memory_server.url, "GET", "/healthz").json == {"status": "alive"}
    assert ask(memory_server.url, "GET", "/readyz").json == {"status": "ready"}


def test_capabilities_say_what_the_server_can(memory_server: Server, disk_server: Server) -> None:
    """Durability disk is promised by a server with a root only, and the limits are those of the settings."""
    memory, disk = (
        ask(server.url, "GET", "/v1/capabilities").json for server in (memory_server, disk_server)
    )
    assert memory["durabilities"] == ["host"]
    assert disk["durabilities"] == ["host", "disk"]
    assert (memory["format"], memory["limits"]["max_leaves"]) == (1, Settings().max_leaves)


def test_metrics_count_what_happens(memory_server: Server) -> None:
    """Requests by method and status, body bytes in and out, and what is held."""
    frame = frame_of(noise(10_000))
    before = _metrics(memory_server.url)
    ask(memory_server.url, "PUT", "/v1/bundles/metrics/a", frame)
    ask(memory_server.url, "GET", "/v1/bundles/metrics/a")
    ask(memory_server.url, "GET", "/v1/bundles/metrics/absent")
    after = _metrics(memory_server.url)

    def grown(name: str) -> float:
        return after[name] - before.get(name, 0)

    assert grown('residual_store_requests_total{method="PUT",status="201"}') == 1
    assert grown('residual_store_requests_total{method="GET",status="404"}') == 1
    assert grown("residual_store_received_bytes_total") == len(frame)
    assert len(frame) < grown("residual_store_sent_bytes_total") < 2 * len(frame)
    assert grown('residual_store_bundles{tier="host"}') == 1
    assert grown('residual_store_bundle_bytes{tier="host"}') == 10_000
    assert grown("residual_store_host_held_bytes") >= 10_000
    ask(memory_server.url, "DELETE", "/v1/bundles/metrics/a")


def test_metrics_have_the_form_of_prometheus(memory_server: Server) -> None:
    """Each line is a comment or a name with labels and a number."""
    answer = ask(memory_server.url, "GET", "/metrics")
    assert answer.headers["content-type"].startswith("text/plain; version=")
    form = re.compile(r'[a-z_]+(\{[a-z_]+="[^"]*"(,[a-z_]+="[^"]*")*\})? [-+.0-9e]+')
    lines = answer.body.decode().splitlines()
    assert len(lines) > 10
    assert [line for line in lines if line[:1] != "#" and not form.fullmatch(line)] == []


def test_expired_bundles_are_swept_and_counted() -> None:
    """The server removes by itself what has expired, and its memory is free again."""
    with running_server(environment={"RESIDUAL_STORE_SWEEP_SECONDS": "0.1"}) as server:
        with open_store(server.url) as store:
            store.put("sweep/a", noise(1 << 20), ttl=0.2)
            assert store.usage().host_held_bytes >= 1 << 20
            until(lambda: store.usage().expired == 1, what="the sweep")
            until(lambda: store.usage().host_held_bytes == 0, what="the memory's return")
        assert _metrics(server.url)["residual_store_expired_bundles"] == 1


def test_a_server_whose_index_is_gone_answers_at_once(tmp_path: Path) -> None:
    """Listings are whole from the first request on, and usage says how much is still to be read until nothing is."""
    keys = [f"run/{number:02}" for number in range(50)]
    with open_store(tmp_path.as_uri()) as store:
        for number, key in enumerate(keys):
            store.put(key, noise(100, seed=number))
    for part in tmp_path.glob("index.sqlite*"):
        part.unlink()
    with running_server(root=tmp_path) as server, open_store(server.url) as store:
        assert [stat.key for stat in store.list(limit=100).entries] == keys
        until(lambda: store.usage().unindexed == 0)
        assert ask(server.url, "GET", "/v1/usage").json["unindexed"] == 0
        assert [run.bundles for run in store.usage().runs] == [50]
