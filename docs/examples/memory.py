"""What is measured: bytes of live arrays outside of a compiled step, and of temporaries inside of one."""

from __future__ import annotations

from typing import Any

import jax

__all__ = ["LiveBytes", "temporary_bytes"]


class LiveBytes:
    """Samples of the bytes of all device arrays of this process, each buffer counted once.

    What a compiled function takes while it runs is not in them.
    """

    def __init__(self) -> None:
        self.samples: list[int] = []

    def __call__(self) -> None:
        """Take a sample."""
        buffers = {array.unsafe_buffer_pointer(): array.nbytes for array in jax.live_arrays()}
        self.samples.append(sum(buffers.values()))


def temporary_bytes(step: Any, *args: Any) -> int:
    """What XLA plans for the temporaries of a jitted step, beside its arguments and results; the step does not run."""
    return int(step.lower(*args).compile().memory_analysis().temp_size_in_bytes)
