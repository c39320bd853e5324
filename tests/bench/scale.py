"""How the store behaves with many bundles: 100,000 in memory and 20,000 on disk, against 1,000 of each.

``python -m tests.bench.scale [--json FILE] [--scale 0.1]`` takes about two minutes, prints a table and writes JSON:
``{"host" | "durable": {OPERATION: {"few_ms", "many_ms", "ratio"}}, "start": {WHAT: SECONDS}}``.

Few and many take turns, operation by operation, and the figures are medians.
The bundles on disk are hard links to one, because the time to write 20,000 says nothing about the time to find them.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from residual_store import Bundle, Store, open_store
from tests.servers import running_server, until

__all__ = ["main"]

ROUNDS = 300
TINY = Bundle.of_arrays({"h": np.arange(16.0)})

type Figures = dict[str, dict[str, float]]


def _key(number: int) -> str:
    return f"run{number % 10}/step-{number // 10}/layer-0"


def _operations(store: Store, keys: Sequence[str]) -> dict[str, Callable[[], object]]:
    chance = random.Random(7)
    new = iter(range(1 << 30))
    return {
        "put": lambda: store.put(f"run5/new/{next(new)}", TINY),
        "get": lambda: store.get(chance.choice(keys)),
        "stat": lambda: store.stat(chance.choice(keys)),
        "list": lambda: store.list(prefix="run5/", after=chance.choice(keys), limit=100),
        "delete": lambda: store.delete(next(iter(store.list(prefix="run5/new/", limit=1).entries)).key),
    }


def _milliseconds(call: Callable[[], object]) -> float:
    started = time.perf_counter()
    call()
    return (time.perf_counter() - started) * 1e3


def compared(few: Store, many: Store, sizes: tuple[int, int]) -> Figures:
    """Medians of each operation in both stores, which take turns."""
    both = [
        _operations(store, [_key(number) for number in range(size)])
        for store, size in zip((few, many), sizes, strict=True)
    ]
    figures: Figures = {}
    for name in both[0]:
        took = [[_milliseconds(operations[name]) for operations in both] for _ in range(ROUNDS)]
        few_ms, many_ms = (statistics.median(times) for times in zip(*took, strict=True))
        figures[name] = {"few_ms": few_ms, "many_ms": many_ms, "ratio": many_ms / few_ms}
    return figures


# In memory


def in_memory(count: int) -> Store:
    """A store with so many bundles in memory."""
    store = open_store("memory://")
    for number in range(count):
        store.put(_key(number), TINY)
    return store


# On disk


def make_root(root: Path, count: int) -> None:
    """A root with so many bundles, and without an index."""
    with open_store(root.as_uri()) as store:
        store.put(_key(0), TINY)
    (template,) = root.glob(f"bundles/{_key(0)}/@*")
    files = [path.relative_to(template) for path in template.rglob("*") if path.is_file()]
    for number in range(1, count):
        copy = root / "bundles" / _key(number) / template.name
        (copy / "d").mkdir(parents=True)
        for file in files:
            os.link(template / file, copy / file)
    for part in root.glob("index.sqlite*"):
        part.unlink()


def start(root: Path, count: int) -> dict[str, float]:
    """Seconds until a server answers, without its index and with it, and until it has made the index."""
    figures = {}
    began = time.perf_counter()
    with running_server(root=root) as server, open_store(server.url) as store:
        figures["ready without its index"] = time.perf_counter() - began
        page = store.list(prefix="run7/", limit=100)
        figures["first page of 100 after that"] = (
            time.perf_counter() - began - figures["ready without its index"]
        )
        if len(page.entries) != min(100, count // 10):
            raise AssertionError(f"the first page has {len(page.entries)} entries")
        figures["bundles left to read then"] = store.usage().unindexed
        until(lambda: store.usage().unindexed == 0, seconds=300)
        figures["index made anew"] = time.perf_counter() - began
        if sum(run.bundles for run in store.usage().runs) != count:
            raise AssertionError("the index does not have all bundles")
    began = time.perf_counter()
    with running_server(root=root):
        figures["ready with its index"] = time.perf_counter() - began
    return figures


def _print(title: str, figures: Figures) -> None:
    table = Table("operation", "few (ms)", "many (ms)", "ratio", title=title)
    for name, one in figures.items():
        table.add_row(name, f"{one['few_ms']:.3f}", f"{one['many_ms']:.3f}", f"{one['ratio']:.2f}")
    Console().print(table)


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", type=Path, help="where the figures go as JSON")
    parser.add_argument("--scale", type=float, default=1.0, help="a part of the bundles, for a quick look")
    given = parser.parse_args()
    few, host, disk = (int(count * given.scale) for count in (1_000, 100_000, 20_000))
    with in_memory(few) as one, in_memory(host) as other:
        in_host = compared(one, other, (few, host))
    _print(f"{few:,} and {host:,} bundles in memory", in_host)
    with tempfile.TemporaryDirectory() as folder:
        roots = {count: Path(folder, str(count)) for count in (few, disk)}
        for count, root in roots.items():
            make_root(root, count)
        seconds = [start(root, count) for count, root in roots.items()][-1]
        with open_store(roots[few].as_uri()) as one, open_store(roots[disk].as_uri()) as other:
            on_disk = compared(one, other, (few, disk))
    _print(f"{few:,} and {disk:,} bundles on disk", on_disk)
    for what, value in seconds.items():
        print(f"{disk:,} on disk, {what}: {value:.2f}")
    if given.json is not None:
        given.json.write_text(json.dumps({"host": in_host, "durable": on_disk, "start": seconds}, indent=2))


if __name__ == "__main__":
    main()
