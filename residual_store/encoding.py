"""Lossless, nearly free encodings of a leaf: one element of a constant, one bit per bool, the index of a repetition."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from residual_store.dtypes import DTYPES, FLOAT0
from residual_store.leaf import Encoding, Leaf

__all__ = ["Encoded", "decode", "encode_all"]

type Host = npt.NDArray[np.generic]
type Payload = npt.NDArray[np.uint8]

_BLOCK = 1 << 16
_SAMPLES = 64
_NOTHING = np.empty(0, np.uint8)


@dataclass(frozen=True, kw_only=True)
class Encoded:
    """One leaf after encoding; an alias has no payload of its own."""

    encoding: Encoding
    payload: Payload
    alias_of: int | None = None
    same_array: bool = False


def encode_all(hosts: list[Host], identities: list[int]) -> list[Encoded]:
    """Encode the leaves of one bundle in order.

    A repetition is found by identity, or by a sample of the bytes and then byte for byte, so two leaves that merely
    compare equal, such as 0.0 and -0.0, are never taken for one.
    """
    first_of: dict[int, int] = {}
    by_sample: dict[bytes, int] = {}
    done: list[Encoded] = []
    for index, (host, identity) in enumerate(zip(hosts, identities, strict=True)):
        source = first_of.setdefault(identity, index)
        if source != index and _same_layout(host, hosts[source]):
            done.append(_alias(source, done[source], same_array=True))
            continue
        encoded = _encode(host)
        twin = by_sample.setdefault(_sample(encoded.payload), index)
        if twin != index and _repeats(encoded, done[twin]):
            first_of[identity] = twin
            encoded = _alias(twin, done[twin], same_array=False)
        done.append(encoded)
    return done


def _alias(source: int, encoded: Encoded, *, same_array: bool) -> Encoded:
    if encoded.alias_of is not None:
        source = encoded.alias_of
    return Encoded(encoding="alias", payload=_NOTHING, alias_of=source, same_array=same_array)


def _sample(payload: Payload) -> bytes:
    """What equal payloads have in common: their length, and bytes at places all over them."""
    step = payload.size // _SAMPLES | 1
    return payload.size.to_bytes(8) + payload[::step].tobytes() + payload[-_SAMPLES:].tobytes()


def _same_layout(one: Host, other: Host) -> bool:
    return one.dtype == other.dtype and one.shape == other.shape and one.nbytes > 0


def _repeats(one: Encoded, other: Encoded) -> bool:
    return (
        one.encoding == other.encoding == "raw"
        and one.payload.size > 0
        and np.array_equal(one.payload, other.payload)
    )


def _encode(host: Host) -> Encoded:
    encoding: Encoding = "raw"
    if host.dtype == DTYPES[FLOAT0] or not host.nbytes:
        payload = _NOTHING
    else:
        little = host.astype(host.dtype.newbyteorder("<"), copy=False)
        flat = np.ascontiguousarray(little).reshape(-1)
        payload = flat.view(np.uint8)
        if flat.size > 1 and _is_constant(payload, host.dtype.itemsize):
            encoding, payload = "constant", payload[: host.dtype.itemsize]
        elif host.dtype == np.bool_ and flat.size > 1:
            encoding, payload = "bits", np.packbits(payload, bitorder="little")
    return Encoded(encoding=encoding, payload=payload)


def _is_constant(payload: Payload, itemsize: int) -> bool:
    """Whether all elements have equal bytes; compares block by block, so a leaf that varies costs next to nothing."""
    rows = payload.reshape(-1, itemsize)
    if not (rows[0] == rows[-1]).all() or not (rows[0] == rows[len(rows) // 2]).all():
        return False
    words = rows.view(
        {2: np.uint16, 4: np.uint32}.get(itemsize, np.uint64 if itemsize % 8 == 0 else np.uint8)
    )
    return all((words[start : start + _BLOCK] == words[0]).all() for start in range(0, len(words), _BLOCK))


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
