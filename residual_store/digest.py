"""The digest of bytes, and copying that takes it on the way."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import xxhash

__all__ = ["DIGEST_BYTES", "Copied", "Payload", "copy_and_digest", "digest_of"]

type Payload = npt.NDArray[np.uint8]
type Copied = Callable[[int, int], object]
"""What is told of each part that has been copied: where it starts and where it ends."""

DIGEST_BYTES = 16

_BLOCK = 512 << 10
"""Bytes that stay in the cache of a core between being copied and being hashed."""

_PART = 16 << 20


def digest_of(data: bytes | memoryview | Payload) -> bytes:
    """The xxh3-128 of ``data``, 16 bytes."""
    return xxhash.xxh3_128_digest(data)


def copy_and_digest(
    source: Payload, target: Payload, *, copied: Copied = lambda start, stop: None, base: int = 0
) -> bytes:
    """Copy ``source`` to ``target`` of the same length, and return the digest of what is there now.

    It takes little longer than the copy, because each block is hashed while it is in the cache.
    ``copied`` is called with the start and the end of each part that has been copied, counted from ``base``.

    >>> target = np.empty(3, np.uint8)
    >>> copy_and_digest(np.arange(3, dtype=np.uint8), target) == digest_of(bytes([0, 1, 2]))
    True
    """
    nbytes = source.nbytes
    if nbytes <= _BLOCK:
        target[:] = source
        copied(base, base + nbytes)
        return digest_of(target)
    digest = xxhash.xxh3_128()
    for start in range(0, nbytes, _PART):
        stop = min(start + _PART, nbytes)
        for at in range(start, stop, _BLOCK):
            block = target[at : min(at + _BLOCK, stop)]
            # Lets other threads run meanwhile, which an assignment to a memoryview does not.
            np.copyto(block, source[at : at + block.nbytes])
            digest.update(block)
        copied(base + start, base + stop)
    return digest.digest()
