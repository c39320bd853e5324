"""Memory: what a bundle of 1 GiB costs the server and its clients beyond the bundle itself."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from residual_store import Bundle, open_store
from tests.server.memory_client import LEAF_BYTES, LEAVES, peak, reset_peak, resident
from tests.server.raw import Connection, frame_of, head_of
from tests.servers import running_server, until
from tests.store.bundles import noise

GIB, MIB = 1 << 30, 1 << 20


@dataclass(frozen=True)
class Cost:
    """Peak growth of both processes over one transfer, in bytes, and the seconds that it took."""

    server: int
    client: int
    seconds: float

    def __str__(self) -> str:
        return (
            f"server +{self.server / MIB:.0f} MiB, client +{self.client / MIB:.0f} MiB, {self.seconds:.2f} s"
        )


def _transfer(what: str, url: str, server: int, rest: int) -> Cost:
    reset_peak(server)
    command = [sys.executable, "-m", "tests.server.memory_client", what, url]
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=120)
    grown, seconds, intact = done.stdout.split()
    assert intact == "True"
    return Cost(server=peak(server) - rest, client=int(grown), seconds=float(seconds))


@pytest.mark.parametrize("where", ["memory", "disk"])
def test_a_bundle_costs_its_size_once(tmp_path: Path, where: str) -> None:
    """The server holds at most 1.1 GiB for it at any time, and a client nothing above the arrays themselves."""
    assert LEAVES * LEAF_BYTES == GIB
    with running_server(root=None if where == "memory" else tmp_path) as server:
        process = server.process.pid
        rest = resident(process)
        put = _transfer("put", server.url, process, rest)
        get = _transfer("get", server.url, process, rest)
    print(f"\n1 GiB, {where} root, put: {put}; get: {get}")
    assert put.server <= 1.1 * GIB
    assert get.server <= 1.1 * GIB
    assert put.client <= 64 * MIB
    assert get.client <= GIB + 64 * MIB


@pytest.mark.parametrize(("where", "segments"), [("memory", True), ("disk", False)])
def test_a_thousand_rounds_cost_little(tmp_path: Path, where: str, segments: bool) -> None:
    """After puts, gets and deletes of mixed sizes a server has at most 150 MB above what it holds, and then what it had."""
    sizes, held = np.random.default_rng(7), 0
    noisy = noise(32 * MIB).payloads[0]
    with running_server(root=None if where == "memory" else tmp_path) as server:
        process = server.process.pid
        with open_store(server.url, segments=segments) as store:
            store.put("memory/first", Bundle.of_arrays({"a": noisy}))
            assert store.get("memory/first").payloads[0].nbytes == noisy.nbytes
            store.delete("memory/first")
            until(lambda: not store.usage().host_idle_bytes, what="idle memory given back")
            rest = resident(process)
            for i in range(1000):
                nbytes = int(4096 * 2 ** sizes.uniform(0, 13))
                store.put(f"memory/{i}", Bundle.of_arrays({"a": noisy[:nbytes]}))
                assert store.get(f"memory/{i}").payloads[0].nbytes == nbytes
                held += nbytes if i % 50 == 0 else 0
                if i % 50:
                    store.delete(f"memory/{i}")
            above, recycled = resident(process) - rest - held, store.usage().segments_recycled
            store.delete_prefix("memory/")
            until(lambda: resident(process) - rest < 8 * MIB, what="the server's memory as at its start")
            print(
                f"\n{above / MIB:.0f} MiB above {held / MIB:.0f}, then {(resident(process) - rest) / MIB:.0f}"
            )
            assert above <= 150_000_000
            assert recycled > 0
            assert store.usage().host_held_bytes == 0


def test_readers_that_do_not_read_cost_little() -> None:
    """Eight clients that ask for 256 MiB each and read nothing cost the server a few MiB each, and it still answers."""
    with running_server() as server, open_store(server.url) as store, contextlib.ExitStack() as open_ones:
        store.put("memory/slow", noise(256 * MIB))
        reset_peak(server.process.pid)
        rest = resident(server.process.pid)
        for _ in range(8):
            connection = open_ones.enter_context(Connection(server.url))
            connection.send(head_of("GET", "/v1/bundles/memory/slow"))
            assert connection.socket.recv(9) == b"HTTP/1.1 "
        assert store.stat("memory/slow").nbytes == 256 * MIB
        assert peak(server.process.pid) - rest < 8 * 16 * MIB


def test_a_chunked_upload_costs_its_size_once() -> None:
    """Without Content-Length the leaves go straight to where they stay as well."""
    frame = frame_of(noise(256 * MIB))
    with running_server() as server, Connection(server.url) as connection:
        rest = resident(server.process.pid)
        reset_peak(server.process.pid)
        connection.send(head_of("PUT", "/v1/bundles/memory/chunked", {"Transfer-Encoding": "chunked"}))
        for start in range(0, len(frame), MIB):
            part = memoryview(frame)[start : start + MIB]
            connection.send(b"%x\r\n" % len(part), part, b"\r\n")
        connection.send(b"0\r\n\r\n")
        assert connection.answer().status == 201
        assert peak(server.process.pid) - rest < 1.1 * 256 * MIB
