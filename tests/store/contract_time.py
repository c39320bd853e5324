"""What every store promises about listings, deletion, leases, waiting, programs and usage, as tests."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from residual_store import Bundle, Store
from residual_store.errors import NotFound
from residual_store.manifest import UserValue
from tests.servers import until
from tests.store.bundles import assert_equal, noise
from tests.store.contract_refusals import RefusalContract

__all__ = ["FullStoreContract"]

type PassTime = Callable[[float], None]
"""Lets seconds pass: turns an injected clock on, or does nothing where real time passes by itself."""


def _keys(store: Store, prefix: str) -> list[str]:
    return [entry.key for entry in store.list(prefix=prefix).entries]


def _is_gone(store: Store, key: str) -> bool:
    try:
        store.stat(key)
    except NotFound:
        return True
    return False


class FullStoreContract(RefusalContract):
    """All of the contract."""

    # Listing and deletion

    def test_pages_are_in_key_order_and_stable(self, store: Store, run: str) -> None:
        """Following `next` meets every key once, although others are added and deleted meanwhile."""
        names = [
            "b",
            "a/b",
            "a",
            "a-b",
            "a/a",
            "C",
            "z",
            "10",
            "2",
            "_",
            "b/c/d",
            "a.b",
            "b=1",
            "b,2",
            "b+3",
            "b:4",
        ]
        for name in names:
            store.put(f"{run}/{name}", noise(1))
        seen: list[str] = []
        after: str | None = ""
        while after is not None:
            page = store.list(prefix=f"{run}/", after=after, limit=3)
            assert len(page.entries) <= 3
            seen += [entry.key for entry in page.entries]
            after = page.next
            if len(seen) == 6:
                store.put(f"{run}/0-new-before", noise(1))
                store.put(f"{run}/zz-new-behind", noise(1))
                store.delete(seen[0])
        assert seen == sorted(f"{run}/{name}" for name in [*names, "zz-new-behind"])

    def test_a_full_last_page_has_no_next(self, store: Store, run: str) -> None:
        """`next` is None exactly when nothing follows."""
        for name in "abcd":
            store.put(f"{run}/{name}", noise(1))
        first = store.list(prefix=f"{run}/", limit=2)
        second = store.list(prefix=f"{run}/", limit=2, after=first.next or "")
        assert (first.next, second.next) == (f"{run}/b", None)
        assert store.list(prefix=f"{run}/", after=f"{run}/d").entries == ()

    def test_a_prefix_is_text_and_not_a_pattern(self, store: Store, run: str) -> None:
        """A prefix may end within a segment, and no character of it stands for others."""
        for name in ("step_1", "step-1", "step-10/x", "step-2"):
            store.put(f"{run}/{name}", noise(1))
        assert _keys(store, f"{run}/step-1") == [f"{run}/step-1", f"{run}/step-10/x"]
        assert _keys(store, f"{run}/step_") == [f"{run}/step_1"]
        assert _keys(store, f"{run}/absent") == []

    def test_a_run_does_not_reach_its_longer_neighbour(self, store: Store, run: str) -> None:
        """Dropping "run/" leaves "run-2/" alone, and says how many bundles went."""
        for key in (f"{run}/a", f"{run}/a/b", f"{run}-2/a"):
            store.put(key, noise(1))
        assert store.delete_prefix(f"{run}/") == 2
        assert _keys(store, run) == [f"{run}-2/a"]
        assert store.delete_prefix(f"{run}/") == 0

    def test_dropping_more_bundles_than_a_page_has(self, store: Store, run: str) -> None:
        """delete_prefix deletes all of them."""
        bundle = noise(1)
        with ThreadPoolExecutor(4) as threads:
            list(threads.map(lambda i: store.put(f"{run}/{i}", bundle, durability="host"), range(230)))
        assert store.delete_prefix(f"{run}/") == 230
        assert _keys(store, f"{run}/") == []

    def test_a_deleted_bundle_is_gone(self, store: Store, run: str) -> None:
        """A second delete finds nothing, other bundles stay, and the key can be used again."""
        for name in ("a", "a/b", "ab"):
            store.put(f"{run}/{name}", noise(100))
        store.delete(f"{run}/a")
        with pytest.raises(NotFound):
            store.delete(f"{run}/a")
        assert _keys(store, f"{run}/") == [f"{run}/a/b", f"{run}/ab"]
        assert_equal(store.get(f"{run}/a/b"), store.get(f"{run}/a/b"))
        store.put(f"{run}/a", noise(7))
        assert store.get(f"{run}/a").array(0).nbytes == 7

    def test_a_bundle_is_deleted_by_its_digest(self, store: Store, run: str) -> None:
        """With a digest no bundle goes but the one that it names, whatever stands under the key meanwhile."""
        key = f"{run}/a"
        first = store.put(key, noise(100)).digest
        second = store.put(key, noise(7), if_exists="replace").digest
        with pytest.raises(NotFound, match="another one"):
            store.delete(key, digest=first)
        assert store.stat(key).digest == second
        store.delete(key, digest=second)
        with pytest.raises(NotFound):
            store.delete(key, digest=second)

    # Leases

    def test_a_bundle_goes_when_its_lease_ends(self, store: Store, run: str, pass_time: PassTime) -> None:
        """It is in no answer any more, and its key is free for another bundle."""
        receipt = store.put(f"{run}/a", noise(10), ttl=0.8)
        stat = store.stat(f"{run}/a")
        assert stat.expires_at == pytest.approx(stat.arrived + 0.8)
        assert not receipt.existed
        pass_time(0.81)
        until(lambda: _is_gone(store, f"{run}/a"), what="the end of the lease")
        assert _keys(store, f"{run}/") == []
        for call in (store.get, store.manifest, store.prefetch, store.delete):
            with pytest.raises(NotFound):
                call(f"{run}/a")
        with pytest.raises(NotFound):
            store.touch(f"{run}/a", ttl=5)
        store.put(f"{run}/a", noise(20, seed=1))
        assert store.get(f"{run}/a").array(0).nbytes == 20

    def test_touch_starts_the_lease_anew(self, store: Store, run: str, pass_time: PassTime) -> None:
        """A bundle that was touched outlives one that was not; without a ttl it stays."""
        for name in ("touched", "kept", "left"):
            store.put(f"{run}/{name}", noise(10), ttl=1.2)
        before = store.stat(f"{run}/touched").expires_at
        touched = store.touch(f"{run}/touched", ttl=500)
        assert before is not None
        assert touched.expires_at is not None
        assert touched.expires_at > before + 400
        assert store.touch(f"{run}/kept", ttl=None).expires_at is None
        pass_time(1.3)
        until(lambda: _is_gone(store, f"{run}/left"), what="the end of the lease")
        assert _keys(store, f"{run}/") == [f"{run}/kept", f"{run}/touched"]
        pass_time(1000)
        assert f"{run}/kept" in _keys(store, f"{run}/")

    # Waiting

    def test_a_get_waits_for_a_bundle(self, store: Store, run: str) -> None:
        """A get that waits returns when another thread has put the bundle."""
        bundle = noise(1000)
        with ThreadPoolExecutor(1) as threads:
            waiting = threads.submit(lambda: store.get(f"{run}/a", wait=30))
            with pytest.raises(TimeoutError):
                waiting.result(0.2)
            started = time.monotonic()
            store.put(f"{run}/a", bundle)
            assert_equal(waiting.result(10), bundle)
            assert time.monotonic() - started < 5

    def test_several_wait_for_one_bundle(self, store: Store, run: str) -> None:
        """All who wait get it, and one who waits for another key does not."""
        with ThreadPoolExecutor(5) as threads:
            waiting = [threads.submit(lambda: store.get(f"{run}/a", wait=30)) for _ in range(4)]
            other = threads.submit(lambda: store.get(f"{run}/b", wait=0.5))
            store.put(f"{run}/a", noise(3))
            assert [one.result(10).manifest.nbytes for one in waiting] == [3] * 4
            with pytest.raises(NotFound):
                other.result(10)

    def test_waiting_ends(self, store: Store, run: str) -> None:
        """A get that waits in vain raises NotFound after the time that it was given."""
        started = time.monotonic()
        with pytest.raises(NotFound):
            store.get(f"{run}/a", wait=0.3)
        assert 0.29 < time.monotonic() - started < 5

    def test_a_bundle_that_is_there_is_not_waited_for(self, store: Store, run: str) -> None:
        """With `wait`, a bundle that is there comes at once."""
        store.put(f"{run}/a", noise(3))
        started = time.monotonic()
        store.get(f"{run}/a", wait=30)
        assert time.monotonic() - started < 5

    # Tiers, programs, usage

    def test_prefetch_changes_where_and_not_what(self, store: Store, run: str) -> None:
        """The bundle is in the host tier afterwards, with equal bytes, and a replacement is seen at once."""
        bundle = noise(2 << 20, 100)
        store.put(f"{run}/a", bundle)
        assert store.prefetch(f"{run}/a").tier == "host"
        assert store.stat(f"{run}/a").tier == "host"
        assert_equal(store.get(f"{run}/a"), bundle)
        store.put(f"{run}/a", noise(5), if_exists="replace")
        assert store.get(f"{run}/a").manifest.nbytes == 5
        store.prefetch(f"{run}/a")
        store.delete(f"{run}/a")
        assert _is_gone(store, f"{run}/a")

    def test_a_program_is_stored_once(self, store: Store) -> None:
        """The first program under a fingerprint stays, an empty one included, and comes back bit by bit."""
        program = np.random.default_rng(0).bytes(3 << 20)
        for fingerprint, content in (("a1" * 32, program), ("b2" * 32, b"")):
            store.put_program(fingerprint, content)
            store.put_program(fingerprint, content + b"another")
            assert store.get_program(fingerprint) == content

    def test_usage_counts_bundles_and_bytes(self, store: Store, run: str) -> None:
        """Two bundles more are two bundles and their bytes more in their run, and none after their deletion."""
        store.put(f"{run}/a", noise(1000))
        store.put(f"{run}/b", noise(500))
        mine = [entry for entry in store.usage().runs if entry.run == run]
        assert [(entry.bundles, entry.nbytes) for entry in mine] == [(2, 1500)]
        assert store.usage().host_total_bytes > 0
        store.delete_prefix(f"{run}/")
        assert run not in {entry.run for entry in store.usage().runs}

    def test_held_memory_returns_to_where_it_was(self, store: Store, run: str) -> None:
        """A bundle in the host tier holds memory for as long as it is there and no longer."""
        store.put(f"{run}/a", noise(1 << 20), durability="host")
        # Memory of earlier tests may return meanwhile, but none comes beside this bundle's.
        held = store.usage().host_held_bytes
        assert held >= 1 << 20
        store.delete(f"{run}/a")
        until(lambda: store.usage().host_held_bytes <= held - (1 << 20), what="the memory's return")

    def test_user_metadata_comes_back(self, store: Store, run: str) -> None:
        """Text, numbers and truth values keep their type."""
        user: dict[str, UserValue] = {
            "text": "é \N{SNOWMAN}",
            "number": -(1 << 60),
            "float": -0.0,
            "flag": True,
        }
        store.put(f"{run}/a", Bundle.of_arrays({"h": np.arange(3)}, user=user))
        got = store.manifest(f"{run}/a").user
        assert got == user
        assert [type(value) for value in got.values()] == [str, int, float, bool]

    def test_closing_twice_is_closing(self, store: Store, run: str) -> None:
        """close can be called again, as a with block does after an early close."""
        store.put(f"{run}/a", noise(3))
        store.close()
        store.close()

    def test_many_threads_use_one_store(self, store: Store, run: str) -> None:
        """Puts, gets and deletes of several threads do not disturb each other."""
        together = threading.Barrier(6)

        def work(number: int) -> None:
            together.wait()
            for step in range(5):
                bundle = noise(1000 + number, seed=step)
                store.put(f"{run}/{number}/{step}", bundle)
                assert_equal(store.get(f"{run}/{number}/{step}"), bundle)
                if step:
                    store.delete(f"{run}/{number}/{step - 1}")

        with ThreadPoolExecutor(6) as threads:
            list(threads.map(work, range(6)))
        assert sorted(_keys(store, f"{run}/")) == sorted(f"{run}/{number}/4" for number in range(6))
