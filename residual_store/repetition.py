"""Repetition: one element all over a leaf, its first part again and again, or one leaf again in its bundle.

All are found at the speed of memory.

Bytes are compared and not values, so 0.0 is not -0.0.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from residual_store.digest import Payload

__all__ = ["Repetitions", "is_constant", "sample_of"]

type Words = npt.NDArray[np.uint64]

_WORD = 8
_START = 4096
"""Bytes that are compared first; a multiple of every item size."""

_SAMPLES = 64
_FIRST_SPAN, _LONGEST_SPAN = _START // _WORD, 1 << 16
"""Words that are compared at first and at most at once, so that both operands stay in the cache."""

_IN_VAIN_SHARE, _IN_VAIN_BYTES, _COMPARISON_BYTES = 64, 1 << 20, 256 << 10
"""What may be compared in vain: this share of all bytes, at least so many, a comparison taken for so many more."""


def is_constant(payload: Payload, itemsize: int) -> bool:
    """Whether all elements, of which there are two or more, have equal bytes.

    >>> is_constant(np.zeros(12, np.uint8), itemsize=4)
    True
    """
    # What tells most leaves apart, at the price of one slice of an array.
    if payload.item(0) != payload.item(itemsize):
        return False
    first = payload[: 2 * itemsize].tobytes()
    one = first[:itemsize]
    if not first.endswith(one):
        return False
    elements = payload.reshape(-1, itemsize)
    samples = elements[:: len(elements) // _SAMPLES | 1]
    for part in (payload[-2 * _WORD :], payload[:_START], samples):
        if part.tobytes() != one * (part.size // itemsize):
            return False
    if payload.size <= _START:
        return True
    words = _words(payload)
    if itemsize > _WORD:
        return _words_until_different(words[2:], words[:-2]) is None
    return _words_until_different(words, np.broadcast_to(words[0], words.shape)) is None


def sample_of(payload: Payload) -> bytes:
    """Bytes from all over a payload and its end, which equal payloads have in common."""
    # An odd step reaches every byte of an element.
    return payload[:: payload.size // _SAMPLES | 1].tobytes() + payload[-_SAMPLES:].tobytes()


class Repetitions:
    """The payloads of a bundle by their length, the length of their arrays, and a sample of their bytes.

    What is compared in vain is bounded by a share of all bytes and the last such comparison, because each may cost as
    much as a copy; what lies beyond is taken for new.

    >>> repetitions = Repetitions()
    >>> [repetitions.find(index, np.full(3, value, np.uint8), 3, b"") for index, value in enumerate([7, 8, 7])]
    [None, None, 0]
    >>> repetitions.are_tiles(np.array([7, 8, 7, 8], np.uint8), 2)
    True
    """

    def __init__(self) -> None:
        self._payloads: dict[int, Payload] = {}
        self._first: dict[tuple[int, int, bytes], int] = {}
        self._others: dict[int, list[int]] = {}
        self._seen = 0
        self._in_vain = 0

    def find(self, index: int, payload: Payload, array_nbytes: int, sample: bytes) -> int | None:
        """The index of an equal payload of an equal array, remembered with ``index`` if there is none.

        ``array_nbytes`` is the length of the array, which a tile is a part of, and ``sample`` one of the payload's bytes.
        """
        size = payload.size
        self._seen += size
        self._payloads[index] = payload
        first = self._first.setdefault((size, array_nbytes, sample), index)
        return None if first == index else self._equal(index, first)

    def _equal(self, index: int, first: int) -> int | None:
        """The index of an equal payload out of those that have a sample in common with the ``first`` of them."""
        others = self._others.setdefault(first, [])
        for other in (first, *others):
            if not self._may_compare:
                break
            if self._are_equal(self._payloads[index], self._payloads[other]):
                return other
        others.append(index)
        return None

    def are_tiles(self, payload: Payload, count: int) -> bool:
        """Whether the ``count`` parts of one length that a payload consists of are equal."""
        size = payload.size // count
        if payload[size - 1] != payload[-1] or payload[0] != payload[size]:
            return False
        samples = payload.reshape(count, size)[:, :: size // _SAMPLES | 1]
        if not (samples == samples[0]).all() or not self._may_compare:
            return False
        return self._are_equal(payload[size:], payload[:-size])

    @property
    def _may_compare(self) -> bool:
        return self._in_vain <= max(self._seen // _IN_VAIN_SHARE, _IN_VAIN_BYTES)

    def _are_equal(self, one: Payload, other: Payload) -> bool:
        compared = _bytes_until_different(one, other)
        if compared is not None:
            self._in_vain += compared + _COMPARISON_BYTES
        return compared is None


def _bytes_until_different(one: Payload, other: Payload) -> int | None:
    """How many bytes of two runs of one length it took to see that they differ; None if they are equal."""
    if one[-_WORD:].tobytes() != other[-_WORD:].tobytes():
        return _WORD
    words = _words_until_different(_words(one), _words(other))
    return None if words is None else words * _WORD


def _words(payload: Payload) -> Words:
    """All whole words of 8 bytes."""
    return payload[: payload.size // _WORD * _WORD].view(np.uint64)


def _words_until_different(words: Words, others: Words) -> int | None:
    """The same for arrays of words."""
    compared: int = 0
    for span in _spans(words.size):
        compared += span.stop - span.start
        if not (words[span] == others[span]).all():
            return compared
    return None


def _spans(count: int) -> Iterator[slice]:
    """Growing slices of ``count`` words, in turn from the end and from the start, where arrays mostly differ first."""
    start, stop, size = 0, count, _FIRST_SPAN
    while start < stop:
        last = max(stop - size, start)
        yield slice(last, stop)
        first = min(start + size, last)
        yield slice(start, first)
        start, stop, size = first, last, min(2 * size, _LONGEST_SPAN)
