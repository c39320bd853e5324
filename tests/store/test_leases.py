"""Leases: whoever puts removes what has expired, unless somebody else does."""

from __future__ import annotations

from pathlib import Path

from residual_store import Settings
from residual_store.engine.local import LocalStore
from tests.store.bundles import assert_equal, noise
from tests.store.test_store import Clock


def test_a_put_sweeps_only_if_nobody_else_has_for_two_periods() -> None:
    """So a server, which sweeps in a thread, never sweeps in a put that its event loop waits for."""
    clock = Clock()
    store = LocalStore.in_memory(settings=Settings(sweep_seconds=10.0), clock=clock)

    def expired_by_a_put_after(seconds: float) -> int:
        store.put("run/short", noise(8), ttl=1.0, if_exists="replace")
        before = store.usage().expired
        clock.turn(seconds)
        store.put("run/other", noise(8), if_exists="replace")
        return store.usage().expired - before

    assert expired_by_a_put_after(11.0) == 1
    assert expired_by_a_put_after(11.0) == 1
    for _ in range(3):
        store.expire()
        assert expired_by_a_put_after(19.0) == 0
    store.expire()
    assert expired_by_a_put_after(21.0) == 1
    store.close()


def test_what_cannot_be_removed_refuses_no_put(tmp_path: Path) -> None:
    """It is not seen any more, and goes at a later sweep."""
    clock = Clock()
    store = LocalStore.at(tmp_path.as_uri(), settings=Settings(sweep_seconds=10.0), clock=clock)
    store.put("run/short", noise(8), ttl=1.0)
    (tmp_path / "trash").rmdir()
    (tmp_path / "trash").touch()
    clock.turn(11.0)
    other = noise(8)
    store.put("run/other", other)
    assert_equal(store.get("run/other"), other)
    assert [stat.key for stat in store.list().entries] == ["run/other"]
    assert store.usage().expired == 0
    (tmp_path / "trash").unlink()
    (tmp_path / "trash").mkdir()
    assert store.expire() == 1
    store.close()


def test_a_spill_takes_the_lease_as_it_is_now(tmp_path: Path) -> None:
    """A lease that was ended by a touch does not begin again, although the index is lost, nor does one end early by a clock turned back."""
    settings, clock, url = Settings(host_bytes=200_000), Clock(), tmp_path.as_uri()
    store = LocalStore.at(url, settings=settings, clock=clock)
    clock.turn(5000.0)
    store.put("run/turned", noise(10_000), durability="host", ttl=50.0)
    clock.turn(-5000.0)
    store.touch("run/turned", ttl=50.0)
    for key in ("run/touched", "run/left"):
        store.put(key, noise(10_000), durability="host", ttl=50.0)
    store.touch("run/touched", ttl=None)
    clock.turn(40.0)
    for number in range(30):
        store.put(f"run/{number}", noise(10_000), durability="host")
    keys = ("run/touched", "run/left", "run/turned")
    assert [store.stat(key).tier for key in keys] == ["durable"] * 3
    store.close()
    for file in tmp_path.glob("index.sqlite*"):
        file.unlink()
    store = LocalStore.at(url, settings=settings, clock=clock)
    assert store.stat("run/touched").expires_at is None
    for key in keys[1:]:
        expires_at = store.stat(key).expires_at
        assert expires_at is not None
        assert expires_at >= clock() + 10.0
    store.close()
