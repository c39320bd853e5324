"""SIGKILL and SIGTERM at bad moments: a bundle is there wholly or not at all, and a stop comes within its time."""

from __future__ import annotations

import contextlib
import random
import signal
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from residual_store import Bundle, Store, open_store
from residual_store.errors import DataLoss, NotFound
from tests.server.raw import Connection, frame_of, head_of
from tests.servers import Server, running_server, start_server, until
from tests.store.bundles import assert_equal, noise
from tests.store.roots import data_files, generations, leftovers

ROUNDS = 20


def _bundle(seed: int) -> Bundle:
    return noise(5 << 20, 100, 9 << 20, 70_000, 3 << 20, seed=seed).sealed()


def _stages(folder: Path) -> list[Callable[[], bool]]:
    """Moments of the next commit to a key, as seen from outside."""
    before = set(folder.glob("@*"))

    def new(pattern: str) -> list[Path]:
        return [path for one in set(folder.glob("@*")) - before for path in one.glob(pattern)]

    return [
        lambda: bool(set(folder.glob("@*")) - before),
        lambda: any(path.stat().st_size for path in new("d/*")),
        lambda: sum(path.stat().st_size for path in new("d/*")) > 0.5 * (17 << 20),
        lambda: bool(new("manifest.ocdbt")),
    ]


def _kill_during_upload(server: Server, key: str, bundle: Bundle, chance: random.Random) -> str:
    """Kill the server after a random byte of the body, or at a random moment of the commit."""
    assert server.root is not None
    frame = frame_of(bundle)
    stages = _stages(server.root / "bundles" / key)
    with Connection(server.url) as connection:
        connection.send(
            head_of("PUT", f"/v1/bundles/{key}?if_exists=replace", {"Content-Length": str(len(frame))})
        )
        if chance.random() < 0.3:
            end = chance.randrange(len(frame))
            connection.send(memoryview(frame)[:end])
            moment = f"after {end} of {len(frame)} bytes"
        else:
            connection.send(frame)
            number = chance.randrange(4)
            moment = f"at stage {number} of the commit"
            with contextlib.suppress(FileNotFoundError):
                until(stages[number])
        server.stop(signal.SIGKILL)
    return moment


def _get(store: Store, key: str) -> Bundle | None:
    try:
        return store.get(key)
    except NotFound:
        return None


def _check_after_kill(server: Server, key: str, new: Bundle, expected: dict[str, Bundle]) -> list[str]:
    """What is wrong after a restart; ``expected`` has the bundles that must be there, and learns of the new one."""
    assert server.root is not None
    with open_store(server.url) as store:
        wrong = []
        try:
            got = _get(store, key)
        except DataLoss as error:
            wrong.append(f"a bundle was lost: {error}")
            store.delete(key)
            got = expected.pop(key, None)
        if got is not None and (key not in expected or got.manifest == new.manifest):
            expected[key] = new
        elif got is None and expected.pop(key, None) is not None:
            wrong.append("the bundle that was to be replaced is gone")
        if got is not None and not wrong:
            assert_equal(got, expected[key])
        wrong += leftovers(server.root, {entry.key for entry in store.list(prefix="kill/").entries})
        store.put(key, new, if_exists="replace")
        expected[key] = new
        assert_equal(store.get(key), new)
        assert {entry.key for entry in store.list(prefix="kill/").entries} == set(expected)
    return wrong


def _rounds(root: Path, seed: int) -> dict[str, list[str]]:
    """Kill and restart a server again and again; what was wrong after each kill."""
    chance, expected, wrong = random.Random(seed), dict[str, Bundle](), dict[str, list[str]]()
    server = start_server(root=root)
    try:
        for number in range(ROUNDS // 2):
            key, bundle = f"kill/{number % 4}", _bundle(number)
            moment = _kill_during_upload(server, key, bundle, chance)
            server = start_server(root=root)
            seen = {one for found in wrong.values() for one in found}
            if found := set(_check_after_kill(server, key, bundle, expected)) - seen:
                wrong[f"server {seed}, round {number}, {moment}"] = sorted(found)
    finally:
        server.stop(signal.SIGKILL)
    return wrong


def test_a_killed_server_shows_whole_bundles_only(tmp_path: Path) -> None:
    """20 rounds: after a kill the old bundle or the new one is there, whole; nothing is left over; the repeat succeeds."""
    with ThreadPoolExecutor(2) as threads:
        one, other = threads.map(_rounds, (tmp_path / "one", tmp_path / "other"), (5, 6))
    assert one | other == {}


def test_a_killed_delete_is_done_or_not_done(tmp_path: Path) -> None:
    """After a kill in the middle of deletions each bundle is whole or gone, never damaged, and nothing is left over."""
    bundles = {f"kill/{i}": noise(2 << 20, 50, seed=i) for i in range(12)}
    with running_server(root=tmp_path) as server, open_store(server.url) as store:
        for key, bundle in bundles.items():
            store.put(key, bundle)
    server = start_server(root=tmp_path)
    with Connection(server.url) as connection:
        connection.send(head_of("DELETE", "/v1/bundles?prefix=kill/"))
        until(lambda: not all(data_files(tmp_path, key) for key in bundles))
        server.stop(signal.SIGKILL)
    with running_server(root=tmp_path) as server, open_store(server.url) as store:
        kept = {key: got for key in bundles if (got := _get(store, key)) is not None}
        for key, got in kept.items():
            assert_equal(got, bundles[key])
        assert {entry.key for entry in store.list(prefix="kill/").entries} == set(kept)
        assert leftovers(tmp_path, set(kept)) == []


def test_a_delete_killed_after_its_first_step_is_a_delete(tmp_path: Path) -> None:
    """A bundle whose database was removed by a delete, and whose files were not, is gone after a restart, files and all."""
    with running_server(root=tmp_path) as server, open_store(server.url) as store:
        store.put("kill/a", noise(2 << 20, 50))
        store.put("kill/b", noise(2 << 20, 50))
    server = start_server(root=tmp_path)
    with Connection(server.url) as connection:
        connection.send(head_of("DELETE", "/v1/bundles/kill/a"))
        with contextlib.suppress(FileNotFoundError):
            until(lambda: not list((tmp_path / "bundles/kill/a").glob("@*/manifest.ocdbt")))
        server.stop(signal.SIGKILL)
    with running_server(root=tmp_path) as server, open_store(server.url) as store:
        with pytest.raises(NotFound):
            store.get("kill/a")
        assert leftovers(tmp_path, {"kill/b"}) == []


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_stop_does_not_wait_for_a_stalled_upload(tmp_path: Path, number: int) -> None:
    """With half an upload open, the server ends within the configured second, and the upload leaves nothing."""
    frame = frame_of(noise(4 << 20))
    server = start_server(root=tmp_path, environment={"RESIDUAL_STORE_GRACEFUL_SECONDS": "1"})
    with Connection(server.url) as connection:
        connection.send(head_of("PUT", "/v1/bundles/stop/a", {"Content-Length": str(len(frame))}))
        connection.send(frame[: 2 << 20])
        with open_store(server.url) as store:
            until(lambda: store.usage().host_held_bytes >= 4 << 20, what="the upload's start")
        started = time.monotonic()
        assert server.stop(number) == 0
        assert time.monotonic() - started < 5
    assert generations(tmp_path) == {}


def test_a_stop_does_not_wait_for_a_slow_download(tmp_path: Path) -> None:
    """With a download open that nobody reads, the server ends within the configured second."""
    server = start_server(root=tmp_path, environment={"RESIDUAL_STORE_GRACEFUL_SECONDS": "1"})
    with open_store(server.url) as store:
        store.put("stop/a", noise(64 << 20))
    with Connection(server.url) as connection:
        connection.send(head_of("GET", "/v1/bundles/stop/a"))
        assert connection.socket.recv(100).startswith(b"HTTP/1.1 200")
        started = time.monotonic()
        assert server.stop() == 0
        assert time.monotonic() - started < 5


def test_a_stop_ends_a_long_poll(tmp_path: Path) -> None:
    """Who waits for a bundle is told at once that the server stops, with 503."""
    server = start_server(root=tmp_path)
    with Connection(server.url) as connection, open_store(server.url) as store:
        connection.send(head_of("GET", "/v1/bundles/stop/a?wait=50"))
        store.usage()
        started = time.monotonic()
        assert server.stop() == 0
        answer = connection.answer()
        assert (answer.status, answer.code) == (503, "stopping")
        assert time.monotonic() - started < 5


def test_an_upload_that_can_finish_is_finished(tmp_path: Path) -> None:
    """An upload whose bytes keep coming after SIGTERM is stored and answered."""
    bundle = noise(4 << 20)
    frame = frame_of(bundle)
    server = start_server(root=tmp_path)
    with Connection(server.url) as connection, open_store(server.url) as store:
        connection.send(head_of("PUT", "/v1/bundles/stop/a", {"Content-Length": str(len(frame))}))
        connection.send(frame[: 2 << 20])
        until(lambda: store.usage().host_held_bytes >= 4 << 20, what="the upload's start")
        server.process.send_signal(signal.SIGTERM)
        connection.send(frame[2 << 20 :])
        assert connection.answer().status == 201
    assert server.wait() == 0
    with running_server(root=tmp_path) as server, open_store(server.url) as store:
        assert_equal(store.get("stop/a"), bundle)
