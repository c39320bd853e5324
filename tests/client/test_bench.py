"""The benchmark: the real command, and what keeps its figures honest."""

from __future__ import annotations

import contextlib
import json
import math
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from residual_client.bench.contest import contest
from residual_client.bench.figures import LIMIT_OF
from residual_client.bench.limits import forget_pages
from residual_client.bench.machine import file_system
from residual_client.bench.measurement import Pace, measure
from residual_client.bench.peers import PEERS
from residual_client.bench.transports import Served
from residual_client.bench.workload import NAMES, Workload
from residual_store import open_store
from residual_store.errors import DataLoss, InvalidOption
from tests.servers import Server, until

LIMITS = {"memcpy", "socket_send", "socket_receive"}
DISK_LIMITS = {"write_fsync", "read_uncached", "read_cached"}


@pytest.fixture(scope="module")
def figures(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The JSON of a quick run with those peers that are installed."""
    path = tmp_path_factory.mktemp("bench") / "figures.json"
    command = [sys.executable, "-m", "residual_store.cli", "bench", "--quick", "--peers", "--json", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=150, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    for name in NAMES:
        assert f"\n{name}: " in done.stdout
    found: dict[str, Any] = json.loads(path.read_text())
    return found


def numbers(value: Any) -> Iterator[float]:
    """All numbers in a JSON value but the spreads, which may be zero."""
    if isinstance(value, dict):
        for name, inner in value.items():
            if not name.endswith("spread"):
                yield from numbers(inner)
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield value


def is_cached(path: Path, offset: int) -> bool:
    """Whether a byte of a file can be read without going to the disk."""
    with path.open("rb", buffering=0) as file, contextlib.suppress(BlockingIOError):
        return os.preadv(file.fileno(), [bytearray(1)], offset, os.RWF_NOWAIT) == 1
    return False


def workload() -> Workload:
    return Workload.of("two", [np.arange(5, dtype=np.float32), np.ones((2, 3), np.int8)])


class TestCommand:
    """`residual-store bench` as a user runs it."""

    def test_measures_every_workload_through_every_way(self, figures: dict[str, Any]) -> None:
        """Each limit, transport and peer has its figures, or stands among what is left out, with a reason."""
        assert tuple(figures["workloads"]) == NAMES
        for one in figures["workloads"].values():
            left_out = figures["left_out"] | one["left_out"]
            assert all(left_out.values())
            has_disk = "durable" not in left_out
            assert set(one["limits"]) == LIMITS | (DISK_LIMITS if has_disk else set())
            assert set(one["transports"]) == set(LIMIT_OF) - set(left_out)
            assert "http" in one["transports"]
            assert set(one["peers"]) == set(PEERS) - set(left_out)

    def test_every_figure_is_a_positive_number(self, figures: dict[str, Any]) -> None:
        """Whatever was measured took some time, and a ratio is that of the two rates that it names."""
        assert all(math.isfinite(number) and number > 0 for number in numbers(figures["workloads"]))
        for one in figures["workloads"].values():
            for name, transport in one["transports"].items():
                for step, limit in LIMIT_OF[name].items():
                    ratio = transport[f"{step}_gbps"] / one["limits"][limit]["gbps"]
                    assert transport[f"{step}_of_limit"] == pytest.approx(ratio)
                    seconds = one["nbytes"] / transport[f"{step}_gbps"] / 1e9
                    assert transport[f"{step}_ms"] == pytest.approx(1e3 * seconds)

    def test_the_client_is_measured_with_a_real_vjp(self, figures: dict[str, Any]) -> None:
        """Of the block, offload and restore stand beside the store over the same transport."""
        for name, one in figures["workloads"].items():
            assert ("http" in one["client"]) == (name == "block")
        block = figures["workloads"]["block"]
        for name, client in block["client"].items():
            store = block["transports"][name]
            assert client["offload_of_store"] == pytest.approx(client["put_gbps"] / store["put_gbps"])
            assert client["stored_of_store"] == pytest.approx(client["stored_gbps"] / store["put_gbps"])
            assert client["stored_ms"] > client["put_ms"]
            memcpy = block["limits"]["memcpy"]["gbps"]
            assert client["offload_of_memcpy"] == pytest.approx(client["put_gbps"] / memcpy)
            assert client["restore_of_memcpy"] == pytest.approx(client["get_gbps"] / memcpy)

    def test_names_no_place_of_this_machine(self, figures: dict[str, Any]) -> None:
        """The JSON can be published: neither the host nor a folder stands in it."""
        text = json.dumps(figures)
        assert os.uname().nodename not in text
        assert str(Path.home()) not in text


class TestContest:
    """What takes part."""

    def test_leaves_nothing_in_a_server_of_the_user(self, memory_server: Server) -> None:
        """With --url every way works, and the server is afterwards as it was."""
        with open_store(memory_server.url) as store:
            before = store.usage().runs
            with contest(nbytes=1 << 12, peers=False, url=memory_server.url) as contestants:
                one = workload()
                ways = [*contestants.limits, *contestants.transports]
                times = measure(one, ways, Pace(warm_up=1, rounds=2, seconds=60.0))
                assert [taken.count for steps in times for taken in steps.values()] == [2] * sum(
                    map(len, times)
                )
                folder = contestants.folder
            assert store.usage().runs == before
        assert not folder.exists()

    @pytest.mark.parametrize("url", ["memory://", "file:///somewhere", "s3://bucket"])
    def test_refuses_what_is_no_server(self, url: str) -> None:
        """A store without a server has no HTTP to measure."""
        with (
            pytest.raises(InvalidOption, match="not the URL of a server"),
            contest(nbytes=1, peers=False, url=url),
        ):
            pass

    def test_what_went_over_http_is_no_segment(self, memory_server: Server) -> None:
        """A transport whose receipts name another one is known, by workload and with a reason."""
        with open_store(memory_server.url) as store:
            ways = [Served(name, store, run="bench-test") for name in ("segment", "http")]
            for way in ways:
                way.put(workload())
                way.drop(workload())
        assert [list(way.detours) for way in ways] == [["two"], []]
        assert all(ways[0].detours.values())


class TestWorkload:
    """The arrays."""

    def test_knows_its_bits(self) -> None:
        """Equal bits pass in any dtype; one flipped bit does not."""
        one = workload()
        hosts = [array.reshape(-1).view(np.uint8).copy() for array in one.arrays.values()]
        one.check(hosts)
        hosts[1][5] ^= 1
        with pytest.raises(DataLoss, match="leaf-1"):
            one.check(hosts)


class TestLimits:
    """The limits."""

    def test_an_uncached_read_finds_no_page(self, tmp_path: Path) -> None:
        """After `forget_pages` the kernel has no page of the file to give without going to the disk."""
        if file_system(tmp_path) == "tmpfs":
            pytest.skip("this folder is in memory")
        path = tmp_path / "file"
        path.write_bytes(os.urandom(1 << 20))
        assert is_cached(path, 1 << 19)

        def is_forgotten() -> bool:
            forget_pages(path)
            return not is_cached(path, 1 << 19)

        # The kernel keeps a page that it has in hand just then.
        until(is_forgotten, seconds=5, what="a page that is not cached")
