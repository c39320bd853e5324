"""A program that ends stores its named bundles, or names them; a forked one is refused."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import residual_client as rc
from tests.servers import Server

_REPOSITORY = Path(__file__).parents[2]


def _leave(url: str, way: str, **settings: float) -> subprocess.CompletedProcess[str]:
    environment = {f"RESIDUAL_STORE_{name.upper()}": str(value) for name, value in settings.items()}
    return subprocess.run(
        [sys.executable, "-m", "tests.client.leaving_child", url, way],
        cwd=_REPOSITORY,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_a_named_bundle_is_stored_before_the_program_ends(disk_server: Server, tmp_path: Path) -> None:
    """The program has offloaded and goes; the bundle is there, on a server and in a directory."""
    for url in (disk_server.url, f"file://{tmp_path}"):
        child = _leave(url, "named")
        assert child.returncode == 0
        assert "not stored" not in child.stderr
        with rc.connect(url) as client:
            assert client.store.stat("leaving/a").durability == "disk"


def test_a_large_bundle_is_stored_while_the_program_ends(memory_server: Server) -> None:
    """Python has ended its pools of threads by then, so one thread copies what two copy else."""
    child = _leave(memory_server.url, "last")
    assert child.stdout.split()[1:] == ["leaving/b"], child.stderr
    with rc.connect(memory_server.url) as client:
        assert client.store.stat("leaving/b").nbytes >= 20 << 20
        client.store.delete_prefix("leaving/")


def test_a_named_bundle_that_cannot_be_stored_is_named() -> None:
    """No server: the reason. A server that never answers: after the limit, how far it was. The program ends in any case."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        child = _leave(url, "named", exit_seconds=0.2)
        assert child.stdout.split() in (["queued"], ["sending"])
        assert "these bundles are not stored: 'leaving/a' (sending after 0.2 s, the limit exit_seconds)" in (
            child.stderr
        )
    child = _leave(url, "named", attempts=1)
    assert child.returncode == 0
    assert "these bundles are not stored: 'leaving/a' (Unreachable: 'leaving/a' is not stored" in child.stderr
    assert child.stderr.count("'leaving/a' is not stored") == 1


def test_a_scratch_bundle_is_not_waited_for() -> None:
    """Nobody could restore it later, so the program ends although the server never answers."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        child = _leave(f"http://127.0.0.1:{silent.getsockname()[1]}", "scratch", exit_seconds=3600)
    assert (child.returncode, child.stderr) == (0, "")


def test_a_forked_process_is_refused_and_harms_nothing(memory_server: Server) -> None:
    """Every call says so at once, close and exit leave the parent's bundles alone, and the parent goes on."""
    child = _leave(memory_server.url, "forked")
    state, *refusals, restored = child.stdout.split("\n")[:-1]
    assert state in ("queued", "sending", "stored")
    assert refusals == ["RequestRefused True"] * 4
    assert restored == "True"
    with rc.connect(memory_server.url) as client:
        client.delete("leaving/a")
