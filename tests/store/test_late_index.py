"""The late index: nobody can tell that the index of the host tier learns of changes late."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import given, strategies as st

from residual_store import Bundle, Settings, Stat
from residual_store.engine.host import HostTier
from residual_store.engine.late_index import LateIndex
from residual_store.shared_leaf import SharedLeaf, with_shared
from residual_store.stat import stat_of

_SETTINGS = Settings(dedup_bytes=16, dedup_seconds=10.0)
_LEAF = np.arange(8.0)
_WHOLE = Bundle.of_arrays({"W": _LEAF, "x": np.arange(3.0)}).sealed()
_NAME = SharedLeaf.of(_WHOLE.manifest.leaves[0])
_SHARED = _NAME.bundle(_WHOLE.payloads[0])
_KEYS = ("run/a", "run/b", "run/c")

_STEPS = st.one_of(
    st.tuples(st.just("put"), st.sampled_from(_KEYS), st.booleans()),
    st.tuples(st.just("remove"), st.sampled_from(_KEYS)),
    st.tuples(st.just("lease"), st.sampled_from(_KEYS), st.sampled_from([None, 5.0, 30.0])),
    st.tuples(st.just("share")),
    st.tuples(st.just("keep"), st.floats(0.0, 50.0)),
    st.tuples(st.just("collect")),
    st.tuples(st.just("wait"), st.floats(0.0, 20.0)),
)


class _Rehearsal:
    """A host tier, at a time of its own, that does steps."""

    def __init__(self) -> None:
        self.now = 0.0
        self.host = HostTier(_SETTINGS, clock=lambda: self.now)

    def step(self, name: str, *given: Any) -> None:
        host = self.host
        match name:
            case "put":
                key, shares = given
                shares = shares and host.shared(_NAME.key("run")) is not None
                bundle = with_shared(_WHOLE, [0]) if shares else _WHOLE
                host.put(self._stat(key, bundle, None), bundle)
            case "share":
                host.put(self._stat(_NAME.key("run"), _SHARED, self.now + 10.0), _SHARED)
            case "lease":
                key, seconds = given
                host.lease(key, None if seconds is None else self.now + seconds)
            case "keep":
                host.keep(_NAME.key("run"), self.now + given[0])
            case "collect":
                host.collect(self.now)
            case "wait":
                self.now += given[0]
            case _:
                host.remove(*given)

    def _stat(self, key: str, bundle: Bundle, expires_at: float | None) -> Stat:
        return stat_of(key, bundle.manifest, tier="host", arrived=self.now, expires_at=expires_at)

    def told(self) -> tuple[object, ...]:
        """All that the index says."""
        index, times = self.host.index, (self.now, self.now + 7.0, self.now + 100.0)
        return (
            [index.page(prefix="run/", after="", limit=9, now=now) for now in times],
            [index.expired(now) for now in times],
            [index.unused(now) for now in times],
            list(index.usage()),
            index.holders(_NAME.key("run")),
            index.keys(),
            [self.host.find(key) for key in _KEYS],
        )


@given(st.lists(_STEPS, max_size=30))
def test_a_late_index_says_what_one_says_that_is_asked_after_each_change(steps: list[Any]) -> None:
    """Puts, removals, leases and shared leaves show as if each had been made in the tables at once, and at its own time."""
    late, asked = _Rehearsal(), _Rehearsal()
    for step in steps:
        late.step(*step)
        asked.step(*step)
        asked.told()
    assert late.told() == asked.told()
    late.host.close()
    asked.host.close()


def test_what_a_removed_bundle_shared_stays_from_its_removal_on() -> None:
    """The time of grace begins when the bundle goes, not when the index is told."""
    one = _Rehearsal()
    for step in (("share",), ("put", "run/a", True), ("wait", 100.0), ("remove", "run/a"), ("wait", 9.5)):
        one.step(*step)
    assert one.host.collect(one.now) == 0
    one.now += 0.5
    assert one.host.collect(one.now) == 1
    one.step("share")
    one.step("put", "run/a", True)
    one.step("put", "run/a", False)
    one.step("wait", 20.0)
    assert one.host.collect(one.now) == 1
    one.host.close()


def test_changes_do_not_wait_without_end() -> None:
    """Somebody who never lists has no more changes noted, and no more of what they hold, than a few."""
    index, most = LateIndex(shared_bytes=16), 0
    stat = stat_of("run/a", _WHOLE.manifest, tier="host", arrived=0.0, expires_at=None)
    for _ in range(1000):
        index.set(stat, _WHOLE.manifest, until=0.0)
        index.remove("run/a", until=0.0)
        most = max(most, len(index._changes))
    assert 2 < most <= 64
    assert len(index.current().keys()) == 0
    index.close()
