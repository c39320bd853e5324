"""A client in a process of its own, which moves a bundle of 1 GiB and prints what that did to its memory.

``python -m tests.server.memory_client put|get URL`` prints peak growth in bytes and seconds.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import numpy as np

from residual_store import Bundle, open_store

__all__ = ["LEAF_BYTES", "LEAVES", "peak", "reset_peak", "resident"]

LEAVES = 16
LEAF_BYTES = 64 << 20


def _status(process: int | str, name: str) -> int:
    for line in Path(f"/proc/{process}/status").read_text().splitlines():
        if line.startswith(name):
            return int(line.split()[1]) << 10
    raise LookupError(name)


def peak(process: int | str = "self") -> int:
    """The most memory that a process has had since its start or the last `reset_peak`, in bytes."""
    return _status(process, "VmHWM:")


def resident(process: int | str = "self") -> int:
    """The memory that a process has now, in bytes."""
    return _status(process, "VmRSS:")


def reset_peak(process: int | str = "self") -> None:
    """Count the peak of a process anew."""
    Path(f"/proc/{process}/clear_refs").write_text("5")


def main(what: str, url: str) -> None:
    leaf = np.arange(LEAF_BYTES // 4, dtype=np.uint32)
    arrays = {f"h{i}": leaf + np.uint32(i) for i in range(LEAVES)} if what == "put" else {}
    with open_store(url) as store:
        store.usage()
        bundle = Bundle.of_arrays(arrays)
        reset_peak()
        before, started = resident(), time.perf_counter()
        if what == "put":
            store.put("memory/a", bundle)
        else:
            bundle = store.get("memory/a")
        seconds = time.perf_counter() - started
        grown = peak() - before
        intact = all(np.array_equal(bundle.array(i), leaf + np.uint32(i)) for i in range(LEAVES))
    print(grown, seconds, intact)


if __name__ == "__main__":
    main(*sys.argv[1:])
