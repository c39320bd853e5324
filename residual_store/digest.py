"""The digest of bytes."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import xxhash

__all__ = ["DIGEST_BYTES", "NO_DIGEST", "Copied", "Payload", "digest_of"]

type Payload = npt.NDArray[np.uint8]
type Copied = Callable[[int, int], object]
"""What is told of each part that has been copied: where it starts and where it ends."""

DIGEST_BYTES = 16

NO_DIGEST = bytes(DIGEST_BYTES)
"""What stands for a digest until it is taken."""


def digest_of(data: bytes | memoryview | Payload) -> bytes:
    """The xxh3-128 of ``data``, 16 bytes."""
    return xxhash.xxh3_128_digest(data)
