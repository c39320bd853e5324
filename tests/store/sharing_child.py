"""A process that puts bundles which share leaves, gets and deletes them, while it and others collect all the time."""

from __future__ import annotations

import random
import sys
import threading
from collections import Counter

import numpy as np

from residual_store import Bundle, Settings, Store
from residual_store.engine.local import LocalStore
from residual_store.errors import LeafNotHeld
from residual_store.shared_leaf import SharedLeaf, with_shared
from residual_store.store import Durability

__all__ = ["SETTINGS", "rounds"]

SETTINGS = Settings(dedup_bytes=1000, dedup_seconds=0.03, sweep_seconds=0.01)
_WEIGHTS = [np.random.default_rng(number).random(2000) for number in range(3)]


def rounds(store: LocalStore, *, name: str, count: int, durability: Durability, seed: int) -> Counter[str]:
    """How many bundles were put with a shared leaf, whole, and whole because the leaf was gone; every one came back as it was."""
    chance, done = random.Random(seed), threading.Event()
    collector = threading.Thread(target=lambda: [store.expire() for _ in iter(lambda: done.wait(0.01), True)])
    collector.start()
    seen: Counter[str] = Counter()
    living: dict[str, Bundle] = {}
    try:
        for number in range(count):
            arrays = {"W": chance.choice(_WEIGHTS), "x": np.random.default_rng(number).random(50)}
            bundle = Bundle.of_arrays(arrays).sealed()
            key = f"run/{name}-{number}"
            seen[_put(store, key, bundle, durability, done if chance.random() < 0.2 else None)] += 1
            living[key] = bundle
            while len(living) > chance.randrange(4):
                _check_and_delete(store, living, chance.choice(list(living)))
        while living:
            _check_and_delete(store, living, next(iter(living)))
    finally:
        done.set()
        collector.join()
    return seen


def _put(
    store: Store, key: str, bundle: Bundle, durability: Durability, pause: threading.Event | None
) -> str:
    (held,) = store.held("run", [SharedLeaf.of(bundle.manifest.leaves[0])], durability=durability)
    if pause is not None:
        # Long enough for the leaf to be collected.
        pause.wait(2 * SETTINGS.dedup_seconds)
    try:
        store.put(key, with_shared(bundle, [0] if held else []), durability=durability)
    except LeafNotHeld:
        store.put(key, bundle, durability=durability)
        return "refused"
    return "shared" if held else "whole"


def _check_and_delete(store: Store, living: dict[str, Bundle], key: str) -> None:
    sent, got = living.pop(key), store.get(key, verify=True)
    assert all(got.array(index).tobytes() == sent.array(index).tobytes() for index in range(2)), key
    store.delete(key)


if __name__ == "__main__":
    url, name, count = sys.argv[1:]
    with LocalStore.at(url, settings=SETTINGS) as opened:
        print(rounds(opened, name=name, count=int(count), durability="disk", seed=int(count)))
