"""What every store promises, as tests: subclass `StoreContract` and give it a store.

`test_store.py` runs it over memory, a directory, and servers over TCP and a unix socket.
"""

from __future__ import annotations

import itertools
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from residual_store import Bundle, Store
from residual_store.dtypes import DTYPES
from residual_store.errors import (
    AlreadyExists,
)
from residual_store.store import IfExists
from tests.store.bundles import assert_equal, every_dtype, filled, noise, values_of

__all__ = ["StoreContract"]

_NUMBERS = itertools.count()

EVERY_CHOICE: tuple[IfExists, ...] = ("error", "same", "replace")


class StoreContract:
    """Putting and getting; `contract_refusals` has what is refused, `contract_time` listings, leases and waiting."""

    @pytest.fixture
    def run(self) -> str:
        """A run that no other test uses, since servers are shared."""
        return f"run{next(_NUMBERS)}"

    # Putting and getting

    def test_every_dtype_comes_back_bit_by_bit(self, store: Store, run: str) -> None:
        """Each dtype that JAX has keeps its dtype, shape and bits, NaN payloads and all."""
        bundle = every_dtype()
        store.put(f"{run}/a", bundle)
        assert_equal(store.get(f"{run}/a"), bundle)

    def test_sealed_or_not_the_same_is_stored(self, store: Store, run: str) -> None:
        """A bundle whose digests are taken on the way is stored under the digest of one that had them before."""
        bundle = noise(3, 300_000, 5000)
        assert not bundle.is_sealed
        taken = store.put(f"{run}/a", bundle)
        assert taken.digest == store.put(f"{run}/b", bundle.sealed()).digest
        assert store.put(f"{run}/a", bundle).existed
        assert_equal(store.get(f"{run}/a"), bundle)

    @pytest.mark.parametrize("name", DTYPES)
    def test_one_leaf_comes_back_bit_by_bit(self, store: Store, run: str, name: str) -> None:
        """A single leaf of each dtype can be had without the others."""
        sent = values_of(name, (2, 3), seed=7)
        store.put(f"{run}/a", Bundle.of_arrays({"other": np.arange(9), "h": sent}))
        got = store.get_leaf(f"{run}/a", 1)
        assert (got.dtype, got.shape, got.tobytes()) == (sent.dtype, sent.shape, sent.tobytes())

    @pytest.mark.parametrize(
        "shape", [(), (1,), (1, 1), (0,), (0, 3), (2, 0, 3), (1, 1, 1, 1, 1, 1, 1, 1, 2)]
    )
    def test_a_shape_stays_what_it_is(self, store: Store, run: str, shape: tuple[int, ...]) -> None:
        """Rank 0 stays rank 0, and a dimension of length 0 is stored like any other."""
        arrays = {name: values_of(name, shape, seed=3) for name in ("float32", "bool", "int4", "float0")}
        bundle = Bundle.of_arrays(arrays)
        store.put(f"{run}/a", bundle)
        assert_equal(store.get(f"{run}/a"), bundle)
        assert [store.get_leaf(f"{run}/a", index).shape for index in range(4)] == [shape] * 4

    def test_a_bundle_without_leaves_is_a_bundle(self, store: Store, run: str) -> None:
        """A VJP that saves nothing can be stored, listed and got."""
        bundle = Bundle.of_arrays({}, user={"why": "a + b"})
        assert store.put(f"{run}/a", bundle).leaves == 0
        assert_equal(store.get(f"{run}/a"), bundle)
        assert store.list(prefix=f"{run}/").entries[0].nbytes == 0

    def test_constants_masks_and_repetitions_come_back(self, store: Store, run: str) -> None:
        """What was made smaller on the way has its full values, and get_leaf follows repetitions."""
        h = np.linspace(0, 1, 5000)
        arrays: dict[str, Any] = {
            "zeros": np.zeros((4000, 3), np.float32),
            "negative zeros": np.full(100, -0.0),
            "mask": np.arange(1003) % 3 == 0,
            "h": h,
            "the same array": h,
            "equal bytes": h.copy().view(np.int64).reshape(50, 100),
        }
        bundle = Bundle.of_arrays(arrays)
        receipt = store.put(f"{run}/a", bundle)
        assert receipt.nbytes < receipt.array_nbytes - 2 * h.nbytes
        got = store.get(f"{run}/a")
        assert_equal(got, bundle)
        for index, sent in enumerate(arrays.values()):
            assert got.array(index).tobytes() == sent.tobytes() == store.get_leaf(f"{run}/a", index).tobytes()

    def test_a_large_leaf_among_small_ones(self, store: Store, run: str) -> None:
        """Leaves above and below the size from which a leaf has an array of its own on disk come back in order."""
        bundle = noise(10, 3 << 20, 70_000, (1 << 20) + 3, 1, 9 << 20)
        store.put(f"{run}/a", bundle)
        assert_equal(store.get(f"{run}/a"), bundle)
        assert all(
            store.get_leaf(f"{run}/a", leaf.index).tobytes() == bundle.array(leaf.index).tobytes()
            for leaf in bundle.manifest.leaves
        )

    def test_order_is_that_of_the_index(self, store: Store, run: str) -> None:
        """Leaf 10 comes after leaf 2, whatever their names sort to."""
        bundle = Bundle.of_arrays({f"leaf {i}": np.full(4, i) + np.arange(4) for i in range(24)})
        store.put(f"{run}/a", bundle)
        got = store.get(f"{run}/a")
        assert [int(got.array(i)[0]) for i in range(24)] == list(range(24))

    @pytest.mark.parametrize("length", [1000, 400_000])
    def test_later_changes_of_the_arrays_change_nothing(self, store: Store, run: str, length: int) -> None:
        """The bytes are those of the moment of the call, although they were not copied to make the bundle."""
        h = np.arange(float(length))
        store.put(f"{run}/a", Bundle.of_arrays({"h": h}))
        h[:] = 0
        assert store.get(f"{run}/a").array(0)[999] == 999

    @pytest.mark.parametrize("length", [10, 400_000])
    def test_what_was_got_cannot_change_what_is_stored(self, store: Store, run: str, length: int) -> None:
        """A view of stored bytes is read-only, and nobody can make it anything else."""
        store.put(f"{run}/a", Bundle.of_arrays({"h": np.arange(float(length))}))
        got = store.get(f"{run}/a").array(0)
        with pytest.raises(ValueError, match="read-only"):
            got[0] = 7
        with pytest.raises(ValueError, match="WRITEABLE"):
            got.flags.writeable = True
        assert store.get(f"{run}/a").array(0)[0] == 0

    def test_receipt_and_stat_say_what_was_stored(self, store: Store, run: str) -> None:
        """Sizes, leaves and durability agree between the receipt, stat, listing and manifest."""
        bundle = Bundle.of_arrays({"h": np.arange(100.0), "zeros": np.zeros(50)}, user={"step": 3})
        receipt, stat = store.put(f"{run}/a", bundle), store.stat(f"{run}/a")
        assert (receipt.leaves, receipt.nbytes, receipt.array_nbytes) == (2, bundle.manifest.nbytes, 1200)
        assert (stat.leaves, stat.nbytes, stat.array_nbytes) == (2, bundle.manifest.nbytes, 1200)
        assert (receipt.tier, receipt.durability) == (stat.tier, stat.durability)
        assert not receipt.existed
        assert receipt.saved_bytes == {"constant": 392}
        assert stat.expires_at is None
        assert store.list(prefix=f"{run}/").entries == (stat,)
        assert store.manifest(f"{run}/a").user == {"step": 3}

    # Keys that exist

    def test_a_repeated_put_is_recognized(self, store: Store, run: str) -> None:
        """The very same bundle again is no error, as after a lost answer, whatever if_exists says."""
        bundle = noise(5000)
        assert not store.put(f"{run}/a", bundle).existed
        for if_exists in EVERY_CHOICE:
            assert store.put(f"{run}/a", bundle, if_exists=if_exists).existed

    def test_another_bundle_is_refused_or_replaces(self, store: Store, run: str) -> None:
        """ "error" and "same" leave the old bundle as it is, "replace" puts the new one in its place."""
        old, new = filled(1), filled(2)
        store.put(f"{run}/a", old)
        for if_exists in EVERY_CHOICE[:2]:
            with pytest.raises(AlreadyExists) as caught:
                store.put(f"{run}/a", new, if_exists=if_exists)
            assert caught.value.fields["key"] == f"{run}/a"
            assert_equal(store.get(f"{run}/a"), old)
        assert not store.put(f"{run}/a", new, if_exists="replace").existed
        assert_equal(store.get(f"{run}/a"), new)
        assert len(store.list(prefix=f"{run}/").entries) == 1

    def test_equal_values_are_the_same_bundle(self, store: Store, run: str) -> None:
        """Equal leaves stored at another time pass as "same", and "error" refuses them."""
        first, second = (Bundle.of_arrays({"h": np.arange(9)}, user={"take": take}) for take in (1, 2))
        store.put(f"{run}/a", first)
        assert store.put(f"{run}/a", second, if_exists="same").existed
        with pytest.raises(AlreadyExists):
            store.put(f"{run}/a", second)
        assert_equal(store.get(f"{run}/a"), first)

    def test_eight_threads_put_equal_bytes(self, store: Store, run: str) -> None:
        """One of them stores the bundle, the others are told that it is there."""
        bundle, together = noise(200_000, 10), threading.Barrier(8)

        def put(_: int) -> bool:
            together.wait()
            return store.put(f"{run}/a", bundle).existed

        with ThreadPoolExecutor(8) as threads:
            assert sorted(threads.map(put, range(8))) == [False] + [True] * 7
        assert_equal(store.get(f"{run}/a"), bundle)

    def test_eight_threads_put_different_bytes(self, store: Store, run: str) -> None:
        """One of them wins, the others are refused, and the stored bundle is the winner's."""
        together = threading.Barrier(8)

        def put(value: int) -> bool:
            together.wait()
            try:
                return not store.put(f"{run}/a", filled(value)).existed
            except AlreadyExists:
                return False

        with ThreadPoolExecutor(8) as threads:
            won = list(threads.map(put, range(8)))
        assert won.count(True) == 1
        assert store.get(f"{run}/a").array(0)[1] == won.index(True)

    def test_eight_threads_replace_and_one_reads(self, store: Store, run: str) -> None:
        """A reader meets one whole bundle at any time, never a mixture and never none."""
        store.put(f"{run}/a", filled(0))
        done = threading.Event()

        def read() -> int:
            rounds = 0
            while rounds < 3 or not done.is_set():
                got = store.get(f"{run}/a")
                assert len({int(got.array(index)[1]) for index in range(4)}) == 1
                rounds += 1
            return rounds

        with ThreadPoolExecutor(9) as threads:
            reader = threads.submit(read)
            list(
                threads.map(
                    lambda value: store.put(f"{run}/a", filled(value), if_exists="replace"), range(24)
                )
            )
            done.set()
            assert reader.result() >= 3
