"""Lossless, nearly free encodings of a leaf: one element of a constant, one bit per bool, the index of a repetition."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from residual_store.digest import Payload, digest_of
from residual_store.dtypes import DTYPES
from residual_store.leaf import Encoding, Leaf

__all__ = ["Encoded", "decode", "encode_all"]

type Host = npt.NDArray[np.generic]
type Words = npt.NDArray[np.uint64]

_LITTLE = "<=|" if sys.byteorder == "little" else "<|"
_NOTHING = np.empty(0, np.uint8)
_SMALL = 4096
"""Bytes up to which a leaf is compared at once; a multiple of every item size."""

_WORD = 8
_SAMPLES = 64
_IN_VAIN_SHARE, _IN_VAIN_BYTES, _COMPARISON_BYTES = 64, 1 << 20, 256 << 10
"""What may be compared in vain: this share of all bytes, at least so many, a comparison taken for so many more."""

_FIRST_SPAN, _LONGEST_SPAN = _SMALL // _WORD, 1 << 16
"""Words that are compared at first and at most at once, so that both operands stay in the cache."""


class Encoded(NamedTuple):
    """One leaf after encoding; an alias has no payload of its own."""

    encoding: Encoding
    payload: Payload
    alias_of: int | None = None
    same_array: bool = False


def encode_all(hosts: Sequence[Host], identities: Sequence[int]) -> list[Encoded]:
    """Encode the leaves of one bundle in order.

    A repetition is found by identity, or by a sample of the bytes and then byte for byte, so two leaves that merely
    compare equal, such as 0.0 and -0.0, are never taken for one.
    """
    first_of: dict[int, int] = {}
    twins = _Twins()
    done: list[Encoded] = []
    for index, (host, identity) in enumerate(zip(hosts, identities, strict=True)):
        source = first_of.setdefault(identity, index)
        if source != index and _same_layout(host, hosts[source]):
            done.append(_alias(source, done[source], same_array=True))
            continue
        encoded = _encode(host)
        twin = twins.find(index, encoded.payload) if encoded.encoding == "raw" else None
        if twin is not None:
            first_of[identity] = twin
            encoded = _alias(twin, done[twin], same_array=False)
        done.append(encoded)
    return done


def _alias(source: int, encoded: Encoded, *, same_array: bool) -> Encoded:
    if encoded.alias_of is not None:
        source = encoded.alias_of
    return Encoded("alias", _NOTHING, source, same_array)


def _same_layout(one: Host, other: Host) -> bool:
    return one.dtype == other.dtype and one.shape == other.shape and one.nbytes > 0


class _Twins:
    """The raw leaves of a bundle by a sample of their bytes.

    Bytes that are compared in vain are bounded by a share of all bytes, but for the last comparison of these: each may
    cost as much as a copy.
    """

    def __init__(self) -> None:
        self._by_sample: dict[tuple[int, bytes], list[tuple[int, Payload]]] = {}
        self._seen = 0
        self._in_vain = 0

    def find(self, index: int, payload: Payload) -> int | None:
        """The leaf with the same bytes; if there is none, remember that leaf ``index`` has these."""
        if not payload.size:
            return None
        self._seen += payload.size
        alike = self._by_sample.setdefault((payload.size, _sample(payload)), [])
        for other, others_payload in alike:
            if self._in_vain > max(self._seen // _IN_VAIN_SHARE, _IN_VAIN_BYTES):
                break
            compared = _compared_until_different(payload, others_payload)
            if compared is None:
                return other
            self._in_vain += _COMPARISON_BYTES + compared
        alike.append((index, payload))
        return None


def _sample(payload: Payload) -> bytes:
    """What equal payloads have in common: a digest of all bytes, or some bytes from all over a large one and its end."""
    if payload.size <= _SMALL:
        return digest_of(payload)
    # An odd step reaches every byte of an element.
    return payload[:: payload.size // _SAMPLES | 1].tobytes() + payload[-_SAMPLES:].tobytes()


def _encode(host: Host) -> Encoded:
    if not host.nbytes:
        return Encoded("raw", _NOTHING)
    if host.dtype.byteorder not in _LITTLE or not host.flags.c_contiguous:
        host = np.ascontiguousarray(host.astype(host.dtype.newbyteorder("<"), copy=False))
    payload = host.reshape(-1).view(np.uint8)
    if host.size > 1:
        if _is_constant(payload, host.itemsize):
            return Encoded("constant", payload[: host.itemsize])
        if host.dtype == np.bool_:
            return Encoded("bits", np.packbits(payload, bitorder="little"))
    return Encoded("raw", payload)


def _is_constant(payload: Payload, itemsize: int) -> bool:
    """Whether all elements have equal bytes."""
    first = payload[: 2 * itemsize].tobytes()
    one = first[:itemsize]
    if not first.endswith(one):
        return False
    for part in (payload[-2 * _WORD :].tobytes(), payload[:_SMALL].tobytes()):
        if part != one * (len(part) // itemsize):
            return False
    if payload.size <= _SMALL:
        return True
    words = _words(payload)
    if itemsize > _WORD:
        return _words_until_different(words[2:], words[:-2]) is None
    return _words_until_different(words, np.broadcast_to(words[0], words.shape)) is None


def _compared_until_different(one: Payload, other: Payload) -> int | None:
    """How many bytes of two runs of one length it took to see that they differ; None if they are equal."""
    if one[-_WORD:].tobytes() != other[-_WORD:].tobytes():
        return _WORD
    words = _words_until_different(_words(one), _words(other))
    return None if words is None else words * _WORD


def _words(payload: Payload) -> Words:
    """All whole words of 8 bytes."""
    return payload[: payload.size // _WORD * _WORD].view(np.uint64)


def _words_until_different(words: Words, others: Words) -> int | None:
    """The same for arrays of words, at the speed of memory."""
    compared: int = 0
    for span in _spans(words.size):
        compared += span.stop - span.start
        if not bool((words[span] == others[span]).all()):
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


def decode(source: Leaf, payload: Payload, *, as_leaf: Leaf | None = None) -> Host:
    """The values of a leaf, a read-only view of ``payload`` where the encoding allows that.

    ``as_leaf`` is the alias, if it is one; it may have another dtype and shape of the same size than its ``source``.
    """
    host = _decode(source, payload)
    if as_leaf is None or (source.dtype, source.shape) == (as_leaf.dtype, as_leaf.shape):
        return host
    bytes_of = np.ascontiguousarray(host).reshape(-1).view(np.uint8)
    return bytes_of.view(DTYPES[as_leaf.dtype]).reshape(as_leaf.shape)


def _decode(leaf: Leaf, payload: Payload) -> Host:
    dtype = DTYPES[leaf.dtype]
    if leaf.encoding == "bits":
        bits = np.unpackbits(payload, count=leaf.elements, bitorder="little")
        return bits.view(np.bool_).reshape(leaf.shape)
    if not leaf.array_nbytes:
        return np.zeros(leaf.shape, dtype)
    values = payload.view(dtype.newbyteorder("<"))
    return (
        np.broadcast_to(values.reshape(()), leaf.shape)
        if leaf.encoding == "constant"
        else values.reshape(leaf.shape)
    )
