"""Leases: whoever puts removes what has expired, unless somebody else does."""

from __future__ import annotations

from residual_store import Settings
from residual_store.engine.local import LocalStore
from tests.store.bundles import noise
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
