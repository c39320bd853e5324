"""The machine: what the figures were taken on, without its name."""

from __future__ import annotations

import os
import platform
from importlib.metadata import version
from pathlib import Path
from typing import Any

__all__ = ["file_system", "machine"]


def machine(folder: Path) -> dict[str, Any]:
    """Processor, memory, kernel, versions, and the file system that ``folder`` is on."""
    return {
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
        "kernel": platform.release().partition("-")[0],
        "python": platform.python_version(),
        "versions": {name: version(name) for name in ("residual-store", "jax", "numpy", "tensorstore")},
        "file_system": file_system(folder),
    }


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def file_system(folder: Path) -> str:
    """The kind of file system that a folder is on, such as ext4 or tmpfs."""
    mounts = [line.split() for line in Path("/proc/self/mounts").read_text().splitlines()]
    below = [(target, kind) for _, target, kind, *_ in mounts if folder.resolve().is_relative_to(target)]
    return max(below, key=lambda mount: len(mount[0]))[1]
