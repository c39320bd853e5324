"""An offload is taken at the call and stored later: what that changes, and what it must not change."""

from __future__ import annotations

import contextlib
import gc
import threading
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import psutil
import pytest

import residual_client as rc
from residual_store import Bundle, Receipt, Settings, open_store
from residual_store.errors import (
    AlreadyExists,
    BundleReplaced,
    Busy,
    InvalidKey,
    InvalidOption,
    NotFound,
    RequestRefused,
    TransferStalled,
    Unreachable,
)
from residual_store.frame import aligned_empty
from tests.client.bits import bits_of
from tests.client.gates import Delaying, Gated
from tests.servers import Server, running_server, until
from tests.store.bundles import noise

KIB, MIB = 1 << 10, 1 << 20

forward = jax.jit(lambda w, x: jax.vjp(lambda w, x: jnp.tanh(x @ w) * x, w, x))
X = jnp.linspace(-1, 1, 64 * 64).reshape(64, 64)


def _vjp(step: float = 0.0) -> Any:
    return forward(X + step, X)[1]


def _gradient(vjp: Any) -> list[str]:
    return bits_of(vjp(X))


@contextlib.contextmanager
def _gated(url: str = "memory://", **options: Any) -> Iterator[tuple[rc.Client, Gated]]:
    """A client behind a closed gate, which is opened at the end."""
    when_full, instead = options.pop("when_full", "wait"), options.pop("instead", None)
    gate = Gated(open_store(url, settings=Settings(**options)), instead=instead)
    with rc.Client(gate, when_full=when_full) as client:  # type: ignore[arg-type]
        try:
            yield client, gate
        finally:
            gate.open()


# The bytes of the moment


def test_bytes_wait_in_memory_of_a_server_on_this_host(memory_server: Server) -> None:
    """An idle block is filled at the call: it is lent to nobody else, shows nothing that is done later, and is what is stored."""
    numbers = np.arange(2 * MIB, dtype=np.float32)
    buffer = aligned_empty(numbers.nbytes).view(np.float32)
    with _gated(memory_server.url) as (client, gate):
        gate.open(1)
        client.store.put("taken/before", noise(numbers.nbytes))
        client.store.delete("taken/before")
        buffer[:] = numbers + 1
        handle = client.offload(
            jax.vjp(lambda x: x * x, jax.device_put(buffer))[1], "taken/a", durability="host"
        )
        assert client.store.lend("taken/a", numbers.nbytes) is None
        buffer[:] = 0
        assert np.array_equal(client.restore(handle)(jnp.ones_like(numbers))[0], 2 * (numbers + 1))
        gate.open(1)
        assert handle.wait().transport == "segment"
        assert np.array_equal(client.restore(handle)(jnp.ones_like(numbers))[0], 2 * (numbers + 1))
        with open_store(memory_server.url, segments=False) as other:
            assert np.array_equal(other.get("taken/a", verify=True).array(0), numbers + 1)
        client.delete(handle)


def test_what_is_done_to_the_leaves_after_the_call_changes_nothing() -> None:
    """A numpy buffer is used again, an array deleted, another donated: from memory and from the store come the bytes of the call."""
    buffer = np.arange(4096, dtype=np.float32)
    deleted, donated = jnp.arange(4096.0) + 1, jnp.arange(4096.0) + 2
    y, vjp = jax.vjp(lambda a, b, c: a * a * b * b * c * c, buffer, deleted, donated)
    wanted = bits_of(vjp(y))
    with _gated() as (client, gate):
        handle = client.offload(vjp)
        buffer[:] = 0
        deleted.delete()
        jax.block_until_ready(jax.jit(lambda x: x * 0, donate_argnums=0)(donated))
        for leaf in jax.tree.leaves(vjp):
            if isinstance(leaf, jax.Array) and not leaf.is_deleted():
                leaf.delete()
        assert bits_of(client.restore(handle)(y)) == wanted
        assert handle.state in ("queued", "sending")
        gate.open()
        handle.wait()
        assert bits_of(client.restore(handle)(y)) == wanted
        assert gate.got == [handle.key]


def test_what_can_be_checked_at_the_call_is_refused_there() -> None:
    """No thread is asked about a key, a lease or a label that no store takes."""
    with _gated() as (client, gate):
        for refused, key, options in (
            (InvalidKey, "no-run", {}),
            (InvalidOption, "run/a", {"ttl": -1}),
            (InvalidOption, "run/a", {"if_exists": "perhaps"}),
            (InvalidOption, "run/a", {"durability": "paper"}),
            (InvalidOption, "run/a", {"user": {"step": "x" * 5000}}),
        ):
            with pytest.raises(refused):
                client.offload(_vjp(), key, **options)  # type: ignore[arg-type]
        assert gate.begun == []


# Queued is not stored


def test_queued_and_stored_are_two_words() -> None:
    """The handle says how far it is; as text it exists once the bundle does; by its key it is waited for."""
    with _gated() as (client, gate):
        handle = client.offload(_vjp(), "run/a")
        until(lambda: gate.begun == ["run/a"])
        assert repr(handle) == "Handle('run/a', sending)"
        assert client.store.list().entries == ()
        assert _gradient(client.restore(handle)) == _gradient(_vjp())
        assert gate.got == []
        found: list[Any] = []
        waiting = [
            threading.Thread(target=lambda: found.append(rc.Handle.from_json(handle.to_json()).digest)),
            threading.Thread(target=lambda: found.append(client.restore("run/a"))),
        ]
        for thread in waiting:
            thread.start()
        gate.open()
        for thread in waiting:
            thread.join(30)
        assert len(found) == 2
        assert repr(handle) == "Handle('run/a', stored)"
        assert handle.digest == client.store.stat("run/a").digest


def test_uploads_of_one_key_are_stored_in_their_order() -> None:
    """The last one stays, and the handle of the one before it says so."""
    with _gated() as (client, gate):
        handles = [client.offload(_vjp(step), "run/a", if_exists="replace") for step in range(5)]
        until(lambda: bool(gate.begun))
        gate.open()
        client.flush()
        assert len(gate.begun) == 5
        assert client.store.stat("run/a").digest == handles[-1].digest
        assert _gradient(client.restore(handles[-1])) == _gradient(_vjp(4))
        with pytest.raises(rc.errors.BundleReplaced):
            client.restore(handles[0])


# Letting go


@pytest.mark.parametrize("url", ["memory://", None])
def test_a_backward_may_overtake_its_upload(url: str | None, memory_server: Server) -> None:
    """The program, which goes out behind the bundle, is waited for."""
    with rc.connect(url or memory_server.url) as client:
        for number in range(6):
            forward = jax.jit(lambda x, number=number: jax.vjp(lambda x: jnp.sin(x) * number, x))
            _, vjp = forward(X)
            handle = client.offload(vjp, f"overtaking/{number}", if_exists="replace")
            (found,) = client.backward(handle)(X)
            np.testing.assert_allclose(found, X * jnp.cos(X) * number, rtol=1e-5)


def test_a_handle_that_has_travelled_runs_its_backward(memory_server: Server) -> None:
    """In a client that has never seen its program; and a traced backward is an ordinary function of JAX."""
    with rc.connect(memory_server.url) as client:
        text = client.offload(_vjp(), "travelled/a", if_exists="replace").to_json()
    with rc.connect(memory_server.url) as client:
        backward = client.backward(rc.Handle.from_json(text))
        wanted = bits_of(backward(X))
        assert bits_of(jax.jit(backward)(X)) == wanted
        assert bits_of(jax.tree.map(lambda one: one[0], jax.lax.map(backward, X[None]))) == wanted
        assert [one.shape for one in jax.eval_shape(backward, X)] == [X.shape, X.shape]
        assert bits_of(backward(X)) == wanted


def test_where_no_thread_can_be_started_an_upload_is_sent_at_once() -> None:
    """As while Python ends; what it calls may offload too."""
    with rc.connect("memory://") as client:
        workers = client._transfers._uploads._workers
        workers._started = lambda: False  # type: ignore[method-assign]
        inner: list[rc.Handle] = []

        def progress(done: int, total: int) -> None:
            if not inner:
                inner.append(client.offload(_vjp(1), "run/inner"))

        client.offload(_vjp(), "run/outer", progress=progress).wait()
        assert inner[0].wait().leaves
        assert _gradient(client.restore("run/outer")) == _gradient(_vjp())


def test_threads_that_offload_one_key_do_not_wait_for_each_other_for_ever() -> None:
    """An upload that waits for another one of its key never comes before it to the one worker there is."""
    wanted = [_gradient(_vjp(step)) for step in range(4)]
    for _ in range(50):
        with rc.connect("memory://", settings=Settings(transfer_threads=1, stall_seconds=5)) as client:
            line = threading.Barrier(4)

            def offload(step: int, client: rc.Client = client, line: threading.Barrier = line) -> None:
                line.wait(30)
                client.offload(_vjp(step), "run/a", if_exists="replace")

            with ThreadPoolExecutor(4) as threads:
                for begun in [threads.submit(offload, step) for step in range(4)]:
                    begun.result(30)
            client.flush()
            assert _gradient(client.restore("run/a")) in wanted


def test_a_bundle_that_is_deleted_before_its_upload_is_not_uploaded() -> None:
    """Named or scratch, deleted or forgotten; what has begun is deleted afterwards, and other bundles stay."""
    with _gated(transfer_threads=1) as (client, gate):
        first = client.offload(_vjp())
        until(lambda: gate.begun == [first.key])
        named, kept = client.offload(_vjp(), "run/a"), client.offload(_vjp(), "run/b")
        forgotten = client.offload(_vjp())
        client.delete(named)
        client.delete(first)
        del forgotten
        assert named.state == "withdrawn"
        with pytest.raises(NotFound, match="'run/a' was deleted before it was stored"):
            named.wait()
        gate.open()
        client.flush()
        assert gate.begun == [first.key, "run/b"]
        assert [stat.key for stat in client.store.list().entries] == ["run/b"]
        assert kept.state == "stored"


def test_a_named_bundle_in_flight_is_gone_when_delete_returns() -> None:
    """Deleting waits for the upload, because the store would bring it back."""
    with _gated() as (client, gate):
        client.offload(_vjp(), "run/a")
        until(lambda: gate.begun == ["run/a"])
        deleting = threading.Thread(target=client.delete, args=("run/a",))
        deleting.start()
        gate.open()
        deleting.join(30)
        assert client.store.list().entries == ()


@pytest.mark.parametrize("url", ["memory://", "http"])
def test_a_handle_deletes_its_own_bundle_alone(url: str, memory_server: Server) -> None:
    """One that was refused or replaced deletes nothing that another has stored, pending or not, and tells nobody again."""
    url = memory_server.url if url == "http" else url
    with rc.connect(url) as client:
        first = client.offload(_vjp(1), "run/own")
        first.wait()
        refused = client.offload(_vjp(2), "run/own")
        with pytest.raises(AlreadyExists):
            refused.wait()
        client.delete(refused)
        assert _gradient(client.restore(first)) == _gradient(_vjp(1))
        untold = client.offload(_vjp(2), "run/own")
        until(lambda: untold.state == "failed")
        client.delete(untold)
        client.flush()
        second = client.offload(_vjp(3), "run/own", if_exists="replace")
        client.delete(first)
        second.wait()
        client.delete(first)
        assert client.store.stat("run/own").digest == second.digest
        travelled = rc.Handle.from_json(second.to_json())
        client.store.put("run/own", noise(8), if_exists="replace")
        client.delete(travelled)
        assert client.store.stat("run/own").nbytes == 8
        client.delete("run/own")
        assert client.store.list(prefix="run/own").entries == ()


def test_a_bundle_whose_answer_was_lost_is_deleted_by_its_handle() -> None:
    """The upload has failed as far as it knows; what somebody else has put there stays."""

    class Losing(Gated):
        def put(self, key: str, bundle: Bundle, **terms: Any) -> Receipt:
            self._store.put(key, bundle, **terms)
            raise Unreachable("the answer was lost")

    inner = open_store("memory://")
    with rc.Client(Losing(inner)) as client:  # type: ignore[arg-type]
        first, second = client.offload(_vjp(1), "run/a"), client.offload(_vjp(2), "run/b")
        for handle in (first, second):
            with pytest.raises(Unreachable):
                handle.wait()
        inner.put("run/b", noise(8), if_exists="replace")
        client.delete(first)
        client.delete(second)
        assert [(stat.key, stat.nbytes) for stat in client.store.list().entries] == [("run/b", 8)]


# Limits


def test_a_restore_waits_for_the_memory_of_those_before_it(tmp_path: Path) -> None:
    """JAX computes behind, so arrays that nobody needs soon hold memory for a while; if they keep it, the error says so."""
    options = {"host_bytes": 10 * MIB, "stall_seconds": 2.0}
    with _gated(tmp_path.as_uri(), **options) as (client, gate), ThreadPoolExecutor(1) as threads:
        gate.open()
        rows = jnp.linspace(0, 1, 1024 * 1024).reshape(1024, 1024)
        sine = jax.jit(lambda x: jax.vjp(jnp.sin, x)[1])
        large = [sine(rows + step) for step in range(3)]
        handles = [client.offload(vjp, f"run/{step}") for step, vjp in enumerate(large)]
        client.flush()
        held = list(map(client.restore, handles[:2]))
        with pytest.raises(
            Busy, match=r"'run/2': 4194304 bytes do not fit .*jax\.block_until_ready"
        ) as refusal:
            client.restore(handles[2])
        assert refusal.value.fields["key"] == "run/2"
        gate.got.clear()
        third = threads.submit(client.restore, handles[2])
        until(lambda: gate.got.count("run/2") > 1)
        held.clear()
        assert bits_of(third.result()) == bits_of(large[2])


def test_a_full_client_raises_or_waits_as_it_was_told() -> None:
    """With a bundle in flight there is no room for another; it comes when that one is stored."""
    nbytes = sum(leaf.nbytes for leaf in jax.tree.leaves(_vjp()))
    with _gated(max_inflight_bytes=2 * nbytes - 1, when_full="raise") as (client, gate):
        handle = client.offload(_vjp(), "run/a")
        with pytest.raises(Busy, match=r"'run/b' has \d+ bytes.*max_inflight_bytes") as refusal:
            client.offload(_vjp(), "run/b")
        assert refusal.value.fields["key"] == "run/b"
        gate.open()
        handle.wait()
        client.offload(_vjp(), "run/b").wait()
    with _gated(max_inflight_bytes=2 * nbytes - 1) as (client, gate):
        client.offload(_vjp(), "run/a")
        waiting = threading.Thread(target=client.offload, args=(_vjp(), "run/b"))
        waiting.start()
        until(lambda: gate.begun == ["run/a"])
        gate.open(1)
        until(lambda: gate.begun == ["run/a", "run/b"])
        waiting.join(30)


def test_bundles_without_bytes_fill_a_client_too() -> None:
    """Each that waits holds a manifest, so a client whose store stands still does not take them for ever."""
    _, empty = jax.jit(lambda x: jax.vjp(jnp.sin, x))(jnp.zeros(0))
    with _gated(max_inflight_bytes=100 * KIB, when_full="raise") as (client, _):
        handles = [client.offload(empty) for _ in range(10)]
        with pytest.raises(Busy, match="max_inflight_bytes"):
            handles += map(client.offload, [empty] * 10)


def test_a_producer_that_is_faster_than_its_store_holds_no_more_than_the_limit(memory_server: Server) -> None:
    """Thirty steps of 8 MiB through 32 MiB: the memory of the process stays flat, although nothing waits for a handle."""
    scale = jax.jit(lambda x: jax.vjp(lambda x: x * x, x)[1])
    with _gated(memory_server.url, max_inflight_bytes=32 * MIB, mapped_bytes=1 << 40) as (client, gate):
        most, process = 0, psutil.Process()
        for step in range(30):
            if step >= 4:
                gate.open(1)
            client.offload(scale(jnp.full(2 * MIB, 1.0) + step + jnp.arange(2.0 * MIB)), f"flat/{step}")
            if step == 6:
                start = process.memory_info().rss
            elif step > 6:
                most = max(most, process.memory_info().rss)
        assert len(gate.begun) <= 30
        gate.open()
        client.flush()
        client.store.delete_prefix("flat/")
    assert most - start < 64 * MIB


def test_a_transfer_that_stands_still_is_named() -> None:
    """Whoever waits is told key, phase and limit: for a handle, for room, in flush and in delete; nothing is lost by it."""
    nbytes = sum(leaf.nbytes for leaf in jax.tree.leaves(_vjp()))
    with _gated(stall_seconds=0.05, transfer_threads=1, max_inflight_bytes=2 * nbytes) as (client, gate):
        handle, queued = client.offload(_vjp(), "run/a"), client.offload(_vjp(), "run/b")
        until(lambda: gate.begun == ["run/a"])
        waits: list[tuple[Callable[[], Any], str, str]] = [
            (handle.wait, "run/a", "sending"),
            (queued.wait, "run/b", "queued"),
            (client.flush, "run/a", "sending"),
            (lambda: client.delete("run/a"), "run/a", "sending"),
            (lambda: client.offload(_vjp(), "run/c"), "run/c", "waiting for room"),
        ]
        for wait, key, phase in waits:
            with pytest.raises(TransferStalled, match=f"'{key}' .*{phase}.* 0.05 s") as stalled:
                wait()
            assert stalled.value.fields == {"key": key, "phase": phase, "limit": 0.05}
        gate.open()
        until(lambda: queued.state == "stored")
        assert handle.wait().key == "run/a"


# Failures


def test_a_server_that_dies_during_an_upload_is_told_where_it_matters() -> None:
    """The third upload meets a dead server: at wait, at the next call that needs the bundle, at flush, by its key."""
    with running_server() as server:
        stopped = threading.Event()

        def instead(key: str) -> None:
            if key == "run/2" and not stopped.is_set():
                server.stop(9)
                stopped.set()

        with _gated(server.url, attempts=1, transfer_threads=1, instead=instead) as (client, gate):
            gate.open()
            handles = [client.offload(_vjp(step), f"run/{step}") for step in range(4)]
            assert [handle.wait().key for handle in handles[:2]] == ["run/0", "run/1"]
            calls: list[Callable[[], Any]] = [
                handles[2].wait,
                lambda: client.restore(handles[2]),
                lambda: client.backward(handles[2]),
                handles[2].to_json,
                client.flush,
            ]
            for call in calls:
                with pytest.raises(Unreachable, match="run/2") as refusal:
                    call()
            assert "'run/3'" in str(refusal.value.__notes__)
            assert repr(handles[2]) == "Handle('run/2', failed)"
            client.flush()


@pytest.mark.parametrize("error", [Unreachable, OSError])
def test_a_failed_upload_holds_no_bytes(error: type[Exception]) -> None:
    """Nobody was told of it yet and its handle lives, so a producer that goes on while a server is down would grow for ever."""
    bundles: list[weakref.ref[Bundle]] = []

    class Down(Gated):
        def put(self, key: str, bundle: Bundle, **terms: Any) -> Receipt:
            bundles.append(weakref.ref(bundle))
            try:
                raise OSError("down")
            except OSError as cause:
                raise error("down") from cause

    with rc.Client(Down(open_store("memory://"))) as client:  # type: ignore[arg-type]
        handle = client.offload(_vjp(), "run/a")
        until(lambda: handle.state == "failed")
        gc.collect()
        assert [bundle() for bundle in bundles] == [None]
        with pytest.raises(error, match="down"):
            client.flush()


def test_a_failure_is_told_although_its_key_was_used_again() -> None:
    """What comes later under the key is stored, and flush says once that what came before it was not."""
    with rc.connect("memory://") as client:
        client.offload(_vjp(), "run/a").wait()
        failed = [client.offload(_vjp(step), "run/a") for step in (1, 2)]
        until(lambda: all(handle.state == "failed" for handle in failed))
        client.offload(_vjp(3), "run/a", if_exists="replace")
        assert _gradient(client.restore("run/a")) == _gradient(_vjp(3))
        with pytest.raises(AlreadyExists, match="'run/a'") as told:
            client.flush()
        assert len([note for note in told.value.__notes__ if "not stored either: 'run/a'" in note]) == 1
        client.flush()


def test_close_raises_what_nobody_was_told(memory_server: Server) -> None:
    """And only that: who was told of a failure by its handle can go on."""
    with rc.connect("memory://") as client:
        client.offload(_vjp(), "run/a").wait()
        with pytest.raises(AlreadyExists):
            client.offload(_vjp(1), "run/a").wait()
    client = rc.connect("memory://")
    client.offload(_vjp(), "run/a").wait()
    client.offload(_vjp(1), "run/a")
    with pytest.raises(AlreadyExists, match="'run/a'"):
        client.close()
    client.close()


def test_what_names_no_bundle_and_no_option_is_refused() -> None:
    """A number, a receipt, or the arguments of an offload in the wrong order; a misspelt option of connect."""
    with rc.connect("memory://") as client:
        receipt = client.offload(_vjp(), "run/a").wait()
        for source in (3, None, b"run/a", receipt):
            for call in (client.restore, client.delete, client.backward):
                with pytest.raises(
                    TypeError, match=f"its handle or its key, and this is a {type(source).__name__}"
                ):
                    call(source)  # type: ignore[operator]
        with pytest.raises(InvalidKey, match="a key is a str, and this is a VJP"):
            client.offload("run/b", _vjp())  # type: ignore[arg-type]
    with pytest.raises(InvalidOption, match="when_full is 'Raise'"):
        rc.connect("memory://", when_full="Raise")  # type: ignore[arg-type]


def test_a_copy_under_another_key_is_restored_by_its_digest_only() -> None:
    """By key it could be the wrong bundle; a handle that names the bytes leaves no doubt."""
    with rc.connect("memory://") as client:
        client.offload(_vjp(1), "run/first").wait()
        digest = client.store.put("run/copy", client.store.get("run/first")).digest
        with pytest.raises(BundleReplaced, match="'run/copy' is a bundle that was first put as 'run/first'"):
            client.restore("run/copy", like=_vjp())
        handle = rc.Handle(key="run/copy", fingerprint=None, known_digest=digest)
        assert _gradient(client.restore(handle, like=_vjp())) == _gradient(_vjp(1))


def test_a_closed_client_says_so_at_the_call(memory_server: Server) -> None:
    """Not later and not of a leaf; closing it again does no harm, and a compiled step stores nothing more."""
    with rc.connect(memory_server.url) as client:
        step = jax.jit(jax.grad(lambda x: jnp.sum(client.offloaded(jnp.sin)(x))))
        step(X)
    with pytest.raises(jax.errors.JaxRuntimeError, match="the client of sin was closed"):
        jax.block_until_ready(step(X))
    with rc.connect("memory://") as client:
        handle = client.offload(_vjp(), "run/a")
    for call in (
        lambda: client.offload(_vjp(), "run/b"),
        lambda: client.restore(handle),
        lambda: client.delete(handle),
    ):
        with pytest.raises(RequestRefused, match="this client was closed"):
            call()
    client.close()


@pytest.mark.parametrize("mapped_bytes", [1, 1 << 40])
def test_progress_goes_from_nothing_to_all(memory_server: Server, mapped_bytes: int) -> None:
    """Told in another thread, for a segment and for a body; a callback that fails does not harm the upload."""
    big = jax.jit(lambda x: jax.vjp(lambda x: x * x, x)[1])(jnp.arange(12.0 * MIB))
    told: list[tuple[int, int]] = []
    with rc.connect(memory_server.url, settings=Settings(mapped_bytes=mapped_bytes)) as client:
        nbytes = client.offload(big, progress=lambda *now: told.append(now)).wait().nbytes
        assert (told[0], told[-1]) == ((0, nbytes), (nbytes, nbytes))
        assert len(told) > 4
        assert told == sorted(told)
        assert client.offload(big, progress=lambda done, total: 1 / 0).wait().nbytes == nbytes


def test_a_thread_outlives_what_comes_in_its_way() -> None:
    """A progress bar that cannot be closed, a deletion and a prefetch without memory: what comes after them is done."""

    class Bar:
        def __call__(self, done: int, total: int) -> None: ...

        def close(self) -> None:
            raise ValueError("no terminal")

    class Short(Gated):
        def get(self, key: str, **options: Any) -> Bundle:
            self.got.append(key)
            if len(self.got) == 1:
                raise MemoryError
            return self._store.get(key, **options)

        def delete(self, key: str, **options: Any) -> None:
            raise MemoryError

    settings = Settings(transfer_threads=1, stall_seconds=5)
    store = Short(open_store("memory://", settings=settings))
    store.open()
    with rc.Client(store) as client:  # type: ignore[arg-type]
        client.offload(_vjp(), progress=Bar()).wait()
        handle = client.offload(_vjp(1), "run/a")
        client.flush()
        client.prefetch([handle])
        until(lambda: store.got)
        assert _gradient(client.restore(handle)) == _gradient(_vjp(1))


# Prefetch


def test_prefetch_runs_backwards_from_what_was_restored() -> None:
    """After a restore the bundles before it are on their way, the newest first, and within the limit."""
    with rc.connect("memory://") as other:
        nbytes = other.offload(_vjp(1)).wait().nbytes
    with _gated(prefetch_bytes=2 * nbytes, transfer_threads=1) as (client, gate):
        gate.open()
        handles = [client.offload(_vjp(step)) for step in range(1, 6)]
        client.flush()
        for step in (5, 4, 3, 2, 1):
            assert _gradient(client.restore(handles[step - 1])) == _gradient(_vjp(step))
        wanted = [handle.key for handle in reversed(handles)]
        assert gate.got == wanted
        client.prefetch(handles)
        until(lambda: len(gate.got) == 7)
        assert gate.got[5:] == [handles[0].key, handles[1].key]
        client.delete(handles[0])
        with pytest.raises(NotFound):
            client.restore(handles[0])


def test_a_prefetched_bundle_is_only_that_of_its_handle() -> None:
    """One that was replaced meanwhile is not restored from what was fetched before."""
    with _gated() as (client, gate):
        gate.open()
        handle = client.offload(_vjp(), "run/a")
        handle.wait()
        client.prefetch([handle])
        until(lambda: gate.got == ["run/a"])
        other = client.offload(_vjp(1), "run/a", if_exists="replace")
        assert _gradient(client.restore("run/a")) == _gradient(client.restore(other)) == _gradient(_vjp(1))
        with pytest.raises(rc.errors.BundleReplaced):
            client.restore(handle)


# All together


def test_two_hundred_steps_with_late_answers_are_the_plain_steps(memory_server: Server) -> None:
    """Forward, offload, drop; then restore backwards under one trace of the backward, and every bit is that of plain steps."""
    traced = []

    @jax.jit
    def backward(vjp: Any, y_bar: Any) -> Any:
        traced.append(0)
        return vjp(y_bar)

    plain = jax.jit(lambda vjp, y_bar: vjp(y_bar))
    store = Delaying(open_store(memory_server.url), seed=4)
    with rc.Client(store) as client:  # type: ignore[arg-type]
        for first in range(0, 200, 8):
            steps = range(first, first + 8)
            handles = [client.offload(_vjp(step), None if step % 2 else f"late/{step}") for step in steps]
            for step, handle in reversed(list(zip(steps, handles, strict=True))):
                gradient = backward(client.restore(handle), X + step)
                assert bits_of(gradient) == bits_of(plain(_vjp(step), X + step))
                if step % 2 == 0:
                    client.delete(handle)
            del handle, handles
        client.flush()
        client.restore(client.offload(_vjp()))
        client.flush()
        assert client.store.list(prefix="late/").entries == ()
    assert len(traced) == 1
