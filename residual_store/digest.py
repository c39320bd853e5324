"""The digest of bytes, and copying that takes it on the way."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import xxhash

__all__ = ["DIGEST_BYTES", "Payload", "copy_and_digest", "digest_of"]

type Payload = npt.NDArray[np.uint8]

DIGEST_BYTES = 16

_BLOCK = 256 << 10
"""Bytes that stay in the cache of a core between being copied and being hashed."""


def digest_of(data: bytes | memoryview | Payload) -> bytes:
    """The xxh3-128 of ``data``, 16 bytes."""
    return xxhash.xxh3_128_digest(data)


def copy_and_digest(source: Payload, target: Payload) -> bytes:
    """Copy ``source`` to ``target`` of the same length, and return the digest of what is there now.

    It takes little longer than the copy, because each block is hashed while it is in the cache.

    >>> target = np.empty(3, np.uint8)
    >>> copy_and_digest(np.arange(3, dtype=np.uint8), target) == digest_of(bytes([0, 1, 2]))
    True
    """
    if source.nbytes <= _BLOCK:
        target[:] = source
        return digest_of(target)
    digest, there, here = xxhash.xxh3_128(), memoryview(target), memoryview(source)
    for start in range(0, source.nbytes, _BLOCK):
        block = there[start : start + _BLOCK]
        block[:] = here[start : start + _BLOCK]
        digest.update(block)
    return digest.digest()
