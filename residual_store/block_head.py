"""The head of a block: the page in front of a segment, by which processes tell whether the segment is still what it was.

::

    16 bytes   ticket: the server changes it when the segment becomes another bundle's
    16 bytes   claim: the client that takes an idle block writes it, and its put names it

Two bytes of the page are locked (`range_lock`): `IN_USE` by who reads or fills the segment, and `CLAIMING` for the moment in
which a claim is written or compared.
"""

from __future__ import annotations

import mmap
import os
import secrets

__all__ = ["CLAIMING", "IN_USE", "clear", "has_claim", "ticket_of", "write_claim", "write_ticket"]

IN_USE, CLAIMING = 0, 1

_BYTES = 16


def write_ticket(memory: mmap.mmap, start: int) -> str:
    """Give the segment of the block at ``start`` a new ticket."""
    return _write(memory, start)


def ticket_of(descriptor: int, start: int) -> str:
    """The ticket of a block; read from the file, because a page of the map may have no memory behind it."""
    return os.pread(descriptor, _BYTES, start).hex()


def write_claim(memory: mmap.mmap, start: int) -> str:
    """Claim a block."""
    return _write(memory, start + _BYTES)


def has_claim(memory: mmap.mmap, start: int, claim: str) -> bool:
    """Whether a block has this claim; an empty one is none."""
    found = memory[start + _BYTES : start + 2 * _BYTES]
    return any(found) and found.hex() == claim


def clear(memory: mmap.mmap, start: int) -> None:
    """End the validity of ticket and claim."""
    memory[start : start + 2 * _BYTES] = bytes(2 * _BYTES)


def _write(memory: mmap.mmap, start: int) -> str:
    secret = secrets.token_bytes(_BYTES)
    memory[start : start + _BYTES] = secret
    return secret.hex()
