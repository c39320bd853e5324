"""What XLA compiles for the cases, kept in a folder, so that the processes of one test run compile it once."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator
from pathlib import Path

import jax
from jax.experimental.compilation_cache import compilation_cache

__all__ = ["Compilations"]

_SETTINGS = {
    "jax_persistent_cache_min_compile_time_secs": 0.0,
    "jax_persistent_cache_min_entry_size_bytes": -1,
}


class Compilations:
    """A persistent compilation cache of JAX, for as long as a test module needs it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    @contextlib.contextmanager
    def kept(self) -> Iterator[None]:
        """Keep all that this process compiles meanwhile."""
        settings = {**_SETTINGS, "jax_compilation_cache_dir": str(self._folder)}
        before = {name: getattr(jax.config, name) for name in settings}
        compilation_cache.reset_cache()
        try:
            for name, value in settings.items():
                jax.config.update(name, value)
            yield
        finally:
            for name, value in before.items():
                jax.config.update(name, value)
            compilation_cache.reset_cache()

    def environment_of(self, child: str) -> dict[str, str]:
        """Environment variables that give a child process a copy of its own, since JAX does not lock the folder."""
        copy = shutil.copytree(self._folder, self._folder.with_name(f"{self._folder.name}-{child}"))
        return {
            name.upper(): str(value)
            for name, value in {**_SETTINGS, "jax_compilation_cache_dir": copy}.items()
        }
