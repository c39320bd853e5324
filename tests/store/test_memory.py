"""Host memory as a budget: the oldest bundles are spilled, copies give way, and what does not fit is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from residual_store import Settings, Stat
from residual_store.engine.local import LocalStore
from residual_store.errors import StoreFull
from tests.servers import until
from tests.store.bundles import assert_equal, filled, noise


def _at(root: Path, settings: Settings | None = None) -> LocalStore:
    return LocalStore.at(root.as_uri(), settings=settings or Settings())


def test_the_oldest_bundles_are_spilled_and_come_back(tmp_path: Path) -> None:
    """When host memory is used up, the oldest bundles go to the disk with their arrival and lease, the newest stay."""
    with _at(tmp_path, Settings(host_bytes=10 << 20)) as store:
        bundles = {f"run/{number}": noise(3 << 20, seed=number) for number in range(6)}
        stats = {}
        for key, bundle in bundles.items():
            store.put(key, bundle, durability="host", ttl=1000)
            stats[key] = store.stat(key)
        assert [store.stat(key).tier for key in bundles] == ["durable"] * 3 + ["host"] * 3
        for key, bundle in bundles.items():
            stat = store.stat(key)
            assert (stat.arrived, stat.expires_at) == (stats[key].arrived, stats[key].expires_at)
            assert_equal(store.get(key), bundle)
        assert store.usage().spilled >= 3
        assert store.usage().host_held_bytes <= 10 << 20
    with _at(tmp_path) as store:
        assert {entry.key for entry in store.list().entries} >= {"run/0", "run/1", "run/2"}


def test_what_cannot_be_got_is_not_put(tmp_path: Path) -> None:
    """A bundle above the host memory is refused at once, or it is stored and can be got."""
    with _at(tmp_path, Settings(host_bytes=4 << 20)) as store:
        bundle = noise(5 << 20)
        try:
            store.put("run/a", bundle)
        except StoreFull:
            assert store.list().entries == ()
        else:
            assert_equal(store.get("run/a"), bundle)


def test_a_prefetch_gives_way(tmp_path: Path) -> None:
    """Copies of durable bundles are dropped for what needs the memory."""
    with _at(tmp_path, Settings(host_bytes=10 << 20)) as store:
        for number in range(3):
            store.put(f"run/{number}", noise(4 << 20, seed=number))
            store.prefetch(f"run/{number}")
        assert [store.stat(f"run/{number}").tier for number in range(3)] == ["durable", "host", "host"]
        store.put("run/big", noise(9 << 20), durability="host")
        assert store.stat("run/big").tier == "host"
        until(lambda: store.usage().host_held_bytes <= 10 << 20)


def test_a_listing_misses_nothing_that_is_spilled_meanwhile(tmp_path: Path) -> None:
    """Each bundle is in one tier or the other, and a page looks at them in the order in which bundles move."""
    with LocalStore.at(tmp_path.as_uri(), settings=Settings()) as store:
        for number in range(3):
            store.put(f"run/{number}", noise(10), durability="host")
        assert store._durable is not None
        page = store._durable.page

        def later(**asked: Any) -> list[Stat]:
            while store._memory._make_room(1):
                pass
            return page(**asked)

        store._durable.page = later  # type: ignore[method-assign]
        assert [stat.key for stat in store.list().entries] == ["run/0", "run/1", "run/2"]
        assert store.delete_prefix("run/") == 3
        assert store.list().entries == ()


def test_what_is_replaced_by_a_bundle_in_memory_is_never_away(tmp_path: Path) -> None:
    """A reader that looks between the two tiers finds the old bundle or the new one."""
    with LocalStore.at(tmp_path.as_uri(), settings=Settings()) as store:
        durable = store._durable
        assert durable is not None
        find, page = durable.find, durable.page

        def replace(number: int) -> None:
            durable.find, durable.page = find, page  # type: ignore[method-assign]
            store.put(f"run/{number}", filled(2), durability="host", if_exists="replace")

        for number in range(2):
            store.put(f"run/{number}", filled(1), durability="disk")
        durable.find = lambda key: replace(0) or find(key)  # type: ignore[method-assign, func-returns-value]
        assert store.get("run/0").array(0)[1] == 2
        for read in ("read", "read_manifest", "read_leaf"):
            store.put("run/0", filled(1), durability="disk", if_exists="replace")
            there = getattr(durable, read)
            setattr(durable, read, lambda *asked, there=there: replace(0) or there(*asked))
            found = {
                "read": lambda: store.get("run/0").array(0)[1],
                "read_manifest": lambda: store.manifest("run/0").leaves and 2,
                "read_leaf": lambda: store.get_leaf("run/0", 0)[1],
            }[read]()
            assert found == 2
            setattr(durable, read, there)
        durable.page = lambda **asked: replace(1) or page(**asked)  # type: ignore[method-assign, func-returns-value]
        assert [stat.key for stat in store.list().entries] == ["run/0", "run/1"]
