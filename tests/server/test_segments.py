"""Segments over HTTP: what a server and a client on one host share, and what they must not mix up."""

from __future__ import annotations

import gc
import signal
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from residual_store import Bundle, Store, open_store
from residual_store.copier import Copier
from residual_store.errors import AlreadyExists, InvalidFrame, NotFound, SegmentUnavailable
from residual_store.frame import frame_head
from residual_store.manifest import Manifest
from residual_store.neighbour import Neighbour
from tests.server.raw import Answer, Connection, head_of
from tests.servers import Server, running_server, start_server, until
from tests.store.bundles import assert_equal, noise

MIB = 1 << 20


@pytest.fixture
def store(memory_server: Server) -> Iterator[Store]:
    """A client that uses segments for what is large."""
    with open_store(memory_server.url) as store:
        yield store


@pytest.fixture
def other(memory_server: Server) -> Iterator[Store]:
    """Another client, which knows nothing of the first one's puts."""
    with open_store(memory_server.url, segments=False) as store:
        yield store


def test_a_receipt_says_which_way_the_bytes_went(store: Store, other: Store) -> None:
    """Through a segment, or over HTTP and why."""
    large = store.put("way/large", noise(8 * MIB))
    small = store.put("way/small", noise(MIB))
    plain = other.put("way/plain", noise(8 * MIB))
    assert (large.transport, large.transport_note) == ("segment", None)
    assert (small.transport, small.transport_note) == ("http", "below 4194304 bytes one request is faster")
    assert (plain.transport, plain.transport_note) == ("http", "shared memory is turned off")


def test_a_client_that_cannot_share_says_so_once(
    memory_server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Where the server's directory is not to be seen, bundles go over HTTP, and one line says why."""
    monkeypatch.setattr(Neighbour.__init__, "__kwdefaults__", {"base": tmp_path})
    with open_store(memory_server.url) as store:
        receipts = [store.put(f"apart/{i}", noise(8 * MIB)) for i in range(2)]
    assert [receipt.transport for receipt in receipts] == ["http", "http"]
    (line,) = [record.getMessage() for record in caplog.records]
    assert receipts[0].transport_note is not None
    assert receipts[0].transport_note in line


def test_a_unix_socket_is_as_good(unix_server: Server) -> None:
    """Segments go beside a unix socket too."""
    bundle = noise(8 * MIB)
    with open_store(unix_server.url) as store:
        assert store.put("unix/a", bundle, durability="host").transport == "segment"
        assert_equal(store.get("unix/a"), bundle)


def test_a_get_copies_nothing(store: Store, other: Store) -> None:
    """Two gets show the same memory of the server, which no view of this process can write to."""
    bundle = noise(8 * MIB)
    other.put("map/a", bundle)
    assert_equal(store.get("map/a"), bundle)
    one, two = store.get("map/a"), store.get("map/a")
    assert_equal(one, bundle)
    assert one.payloads[0].ctypes.data == two.payloads[0].ctypes.data
    with pytest.raises(ValueError, match="read-only"):
        one.payloads[0][0] = 1


def test_a_put_again_uses_the_memory_again(store: Store) -> None:
    """After a delete the same block takes the next bundle; /v1/usage counts it."""
    store.put("again/a", noise(8 * MIB))
    store.delete("again/a")
    before = store.usage()
    for seed in range(5):
        bundle = noise(8 * MIB, seed=seed)
        store.put("again/a", bundle)
        assert_equal(store.get("again/a"), bundle)
        store.delete("again/a")
    after = store.usage()
    assert after.segments_fresh == before.segments_fresh
    assert after.segments_recycled >= before.segments_recycled + 5


class TestOwnPuts:
    """What a client gets without a request is what a request would bring."""

    def test_a_deleted_bundle_is_gone(self, store: Store, other: Store) -> None:
        """Also if somebody else deleted it."""
        store.put("own/deleted", noise(8 * MIB))
        other.delete("own/deleted")
        with pytest.raises(NotFound):
            store.get("own/deleted")

    def test_a_replaced_bundle_is_the_new_one(self, store: Store, other: Store) -> None:
        """Also if somebody else replaced it, whichever way it came."""
        store.put("own/replaced", noise(8 * MIB))
        new = noise(8 * MIB, seed=1)
        other.put("own/replaced", new, if_exists="replace")
        assert_equal(store.get("own/replaced"), new)
        newer = noise(8 * MIB, seed=2)
        store.put("own/replaced", newer, if_exists="replace")
        assert_equal(store.get("own/replaced"), newer)

    def test_a_lease_that_ended_is_over(self, store: Store, other: Store) -> None:
        """By the time that the put gave it, and by one that somebody else gave it later."""
        store.put("own/leased", noise(8 * MIB), ttl=0.001)
        until(lambda: not _is_there(other, "own/leased"))
        assert not _is_there(store, "own/leased")
        store.put("own/leased", noise(8 * MIB, seed=1), ttl=1000)
        assert _is_there(store, "own/leased")
        other.touch("own/leased", ttl=0.001)
        until(lambda: not _is_there(other, "own/leased"))
        assert not _is_there(store, "own/leased")

    def test_a_view_outlives_its_bundle(self, store: Store, other: Store) -> None:
        """What was got before a deletion stays as it was, while the server's memory is used for other bundles."""
        bundle = noise(8 * MIB)
        store.put("own/view", bundle)
        got = store.get("own/view")
        store.delete("own/view")
        for seed in range(1, 4):
            other.put(f"own/{seed}", noise(8 * MIB, seed=seed))
        assert_equal(got, bundle)

    def test_what_a_dead_server_had_is_not_given(self) -> None:
        """After SIGKILL and a new start under the same URL, a bundle in memory is gone, and puts work again."""
        first = start_server()
        with open_store(first.url) as store:
            lost = noise(8 * MIB)
            store.put("own/lost", lost)
            assert_equal(store.get("own/lost"), lost)
            first.stop(signal.SIGKILL)
            with running_server(options=["--port", str(first.port)]):
                with pytest.raises(NotFound):
                    store.get("own/lost")
                bundle = noise(8 * MIB, seed=1)
                assert store.put("own/new", bundle).transport == "segment"
                assert_equal(store.get("own/new"), bundle)

    def test_a_spilled_bundle_comes_from_the_disk(self, tmp_path: Path) -> None:
        """When the server needs the memory, the client's own put moves to the disk, and is read there."""
        environment = {"RESIDUAL_STORE_HOST_BYTES": str(20 * MIB)}
        with (
            running_server(root=tmp_path, environment=environment) as server,
            open_store(server.url) as store,
        ):
            bundles = {f"spill/{seed}": noise(8 * MIB, seed=seed) for seed in range(4)}
            for key, bundle in bundles.items():
                store.put(key, bundle, durability="host")
            for key, bundle in bundles.items():
                assert_equal(store.get(key, verify=True), bundle)
            assert store.stat("spill/0").tier == "durable"


class TestLending:
    """A bundle that was copied into lent memory is put without another copy."""

    def test_only_what_is_at_hand_is_lent(self, store: Store, other: Store) -> None:
        """An idle block of the run that is large enough; a client without segments has none, nor a small bundle."""
        assert store.lend("lend-nothing/a", 8 * MIB) is None
        _have_idle(store, "lend-nothing/a")
        assert store.lend("lend-another/a", 8 * MIB) is None
        assert store.lend("lend-nothing/a", 64 * MIB) is None
        assert store.lend("lend-nothing/a", MIB) is None
        assert other.lend("lend-nothing/a", 8 * MIB) is None
        assert store.lend("lend-nothing/a", 8 * MIB) is not None

    def test_it_is_put_where_it_lies(self, store: Store, other: Store) -> None:
        """Both the client that put it and others read those very bytes, while the bundle lives and after."""
        _have_idle(store, "lend/a")
        bundle, recycled = noise(8 * MIB, seed=1), store.usage().segments_recycled
        lent = _lent(store, "lend/a", bundle)
        assert store.put("lend/a", lent).transport == "segment"
        assert store.usage().segments_recycled == recycled + 1
        for reader in (store, other):
            assert_equal(reader.get("lend/a", verify=True), bundle)
        del lent
        assert_equal(store.get("lend/a", verify=True), bundle)

    def test_it_is_put_under_one_key_so(self, store: Store) -> None:
        """Under the second key it is another copy, so the deletion of the first does not touch it."""
        _have_idle(store, "lend-twice/a")
        bundle = noise(8 * MIB, seed=2)
        lent = _lent(store, "lend-twice/a", bundle)
        store.put("lend-twice/a", lent)
        store.put("lend-twice/b", lent)
        del lent
        store.delete("lend-twice/a")
        store.put("lend-twice/c", noise(8 * MIB, seed=3))
        assert_equal(store.get("lend-twice/b", verify=True), bundle)

    def test_what_is_never_put_comes_back(self, store: Store) -> None:
        """The block is idle again when nobody has it any more."""
        _have_idle(store, "lend-back/a")
        memory = store.lend("lend-back/a", 8 * MIB)
        assert memory is not None
        assert store.lend("lend-back/a", 8 * MIB) is None
        del memory
        assert store.lend("lend-back/a", 8 * MIB) is not None

    def test_a_new_server_gets_what_the_dead_one_lent(self) -> None:
        """The memory outlives the server, and the bundle is copied to the next one."""
        first = start_server()
        with open_store(first.url) as store:
            _have_idle(store, "lend/a")
            bundle = noise(8 * MIB, seed=4)
            lent = _lent(store, "lend/a", bundle)
            first.stop(signal.SIGKILL)
            with running_server(options=["--port", str(first.port)]):
                store.put("lend/a", lent)
                assert_equal(store.get("lend/a", verify=True), bundle)


def _have_idle(store: Store, key: str) -> None:
    """Leave an idle block of 8 MiB in the run of a key."""
    store.put(key, noise(8 * MIB))
    store.delete(key)


def _lent(store: Store, key: str, bundle: Bundle) -> Bundle:
    """The bundle in memory that the store has lent."""
    memory = store.lend(key, bundle.manifest.nbytes)
    assert memory is not None
    return bundle.copied_into(memory, copier=Copier())


def _is_there(store: Store, key: str) -> bool:
    try:
        store.get(key)
    except NotFound:
        return False
    return True


def test_a_block_that_nobody_has_is_refused(store: Store, memory_server: Server) -> None:
    """A put that names a block which its sender has not taken stores nothing, whatever the block is."""
    store.put("block/a", noise(8 * MIB))
    arena = str(_capabilities(memory_server)["directory"]).rpartition("/")[2]
    head = frame_head(noise(8 * MIB).sealed().manifest)
    for where in (f"{arena}:65536", f"{arena}:0", f"{arena}:999999999999", "elsewhere:65536"):
        block = f"{where}:{'5a' * 16}"
        with Connection(memory_server.url) as connection:
            path = f"/v1/bundles/block/b?segment={block}"
            connection.send(head_of("PUT", path, {"Content-Length": str(len(head))}), head)
            answer = connection.answer()
        assert (answer.status, answer.code) == (410, SegmentUnavailable.code)
    assert not _is_there(store, "block/b")


@pytest.mark.usefixtures("_no_collector")
def test_a_refused_put_lets_go_of_its_block(store: Store, other: Store) -> None:
    """The server has the memory again although the garbage collector of the client does not run."""
    store.put("refused/a", noise(8 * MIB))
    held = other.usage().host_held_bytes
    with pytest.raises(AlreadyExists):
        store.put("refused/a", noise(8 * MIB, seed=1))
    until(lambda: other.usage().host_held_bytes == held)


@pytest.fixture
def _no_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


class TestDigests:
    """What may follow the head of a frame whose leaves are in a segment: the digest of each leaf."""

    bundle = Bundle.of_arrays({name: np.arange(MIB, dtype=np.int32) + at for at, name in enumerate("abc")})
    sealed = bundle.sealed().manifest

    @pytest.mark.parametrize("count", [1, 16, 16 * len(sealed.leaves) - 1, 16 * len(sealed.leaves) + 1])
    @pytest.mark.parametrize("manifest", [bundle.manifest, sealed])
    def test_another_length_is_refused(self, memory_server: Server, manifest: Manifest, count: int) -> None:
        """Nothing is stored."""
        assert self._put(memory_server, frame_head(manifest) + b"d" * count) == (400, InvalidFrame.code)

    def test_too_many_are_told_apart_from_a_head_that_broke_off(
        self, memory_server: Server, other: Store
    ) -> None:
        """The answer says how many bytes follow the head, and the block comes back."""
        held, leaves = other.usage().host_held_bytes, len(self.sealed.leaves)
        answer = self._answer(memory_server, frame_head(self.bundle.manifest) + b"d" * (16 * leaves + 1))
        assert f"{16 * leaves + 1} bytes follow the head" in answer.json["detail"]
        until(lambda: other.usage().host_held_bytes == held)

    def test_a_leaf_without_a_digest_is_refused(self, memory_server: Server) -> None:
        """Zeros stand for a digest that is not taken."""
        head, zeros = frame_head(self.bundle.manifest), bytes(16 * len(self.sealed.leaves))
        assert self._put(memory_server, head) == (400, InvalidFrame.code)
        assert self._put(memory_server, head + zeros) == (400, InvalidFrame.code)

    def test_another_digest_is_refused(self, memory_server: Server) -> None:
        """One that contradicts the manifest names the leaf."""
        digests = b"".join([leaf.digest for leaf in self.sealed.leaves[:-1]]) + b"d" * 16
        assert self._put(memory_server, frame_head(self.sealed) + digests) == (400, InvalidFrame.code)

    def test_they_complete_the_manifest(self, memory_server: Server, other: Store) -> None:
        """The bundle is the same as that of a manifest which had them; it is there once and not again for a second put."""
        digests = b"".join(leaf.digest for leaf in self.sealed.leaves)
        assert self._put(memory_server, frame_head(self.bundle.manifest) + digests) == (201, None)
        assert_equal(other.get("digests/a", verify=True), self.bundle)
        assert self._put(memory_server, frame_head(self.sealed)) == (200, None)
        assert self._put(memory_server, frame_head(self.sealed) + digests) == (200, None)
        other.delete("digests/a")

    def _put(self, server: Server, body: bytes) -> tuple[int, str | None]:
        """Status and code of the answer to such a put."""
        answer = self._answer(server, body)
        return answer.status, answer.code if answer.status >= 300 else None

    def _answer(self, server: Server, body: bytes) -> Answer:
        """The answer to a put whose leaves are in a block that was taken for it."""
        with Connection(server.url) as connection:
            connection.send(head_of("POST", f"/v1/segments?key=digests/a&nbytes={self.sealed.nbytes}"))
            assert connection.answer().status == 204
            taken = Neighbour(_capabilities(server)).take(self.sealed.nbytes, "digests")
            assert taken is not None
            block, memory = taken
            self.bundle.copied_into(memory, copier=Copier())
            path = f"/v1/bundles/digests/a?segment={block.to_text()}"
            connection.send(head_of("PUT", path, {"Content-Length": str(len(body))}), body)
            return connection.answer()


def test_a_segment_is_verified_when_it_is_asked_for(store: Store, other: Store) -> None:
    """``verify`` reads all bytes again, and finds them right."""
    bundle = Bundle.of_arrays({"h": np.arange(2 * MIB, dtype=np.float32)})
    store.put("verify/a", bundle)
    assert_equal(store.get("verify/a", verify=True), bundle)
    assert_equal(other.get("verify/a", verify=True), bundle)


def _capabilities(server: Server) -> dict[str, object]:
    with Connection(server.url) as connection:
        connection.send(head_of("GET", "/v1/capabilities"))
        arena: dict[str, object] = connection.answer().json["arena"]
        return arena
