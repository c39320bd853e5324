"""The machine: what the figures were taken on, without its name."""

from __future__ import annotations

import contextlib
import os
import platform
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

__all__ = ["file_system", "machine"]

_PACKAGES = (
    "residual-store",
    "jax",
    "numpy",
    "tensorstore",
    "pyarrow",
    "ray",
    "redis",
    "safetensors",
    "orbax-checkpoint",
)


def machine(folder: Path) -> dict[str, Any]:
    """Processor, memory, kernel, versions, and the file system that ``folder`` is on."""
    return {
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
        "kernel": platform.release().partition("-")[0],
        "python": platform.python_version(),
        "versions": dict(_versions()),
        "file_system": file_system(folder),
    }


def _versions() -> Iterator[tuple[str, str]]:
    """Name and version of each package that has a part in the figures and is installed."""
    for name in _PACKAGES:
        with contextlib.suppress(PackageNotFoundError):
            yield name, version(name)


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
