"""Lossless, nearly free encodings of a leaf: one element of a constant, one bit per bool, one of equal shards, the index of a repetition."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import msgspec
import numpy as np
import numpy.typing as npt

from residual_store.digest import NO_DIGEST, Payload, digest_of
from residual_store.dtypes import DTYPES
from residual_store.leaf import Encoding, Leaf
from residual_store.repetition import Repetitions, is_constant, sample_of

__all__ = ["Encoded", "decode", "encode_all"]

type Host = npt.NDArray[np.generic]

_IS_LITTLE = sys.byteorder == "little"
_LITTLE_DTYPES = {name: dtype.newbyteorder("<") for name, dtype in DTYPES.items()}
_BYTE = np.dtype(np.uint8)
_REPEATED = ("raw", "tiled")
_NOTHING = np.empty(0, _BYTE)
_DIGESTED_AT_ONCE = 4096
"""Bytes up to which a digest costs no more than a sample."""


class Encoded(msgspec.Struct, frozen=True, gc=False):
    """One leaf after encoding; an alias has no payload of its own, and a large one no digest yet."""

    encoding: Encoding
    payload: Payload
    digest: bytes
    alias_of: int | None = None
    same_array: bool = False


def encode_all(hosts: Sequence[Host], identities: Sequence[int], *, tiles: Sequence[int]) -> list[Encoded]:
    """Encode the leaves of one bundle in order; ``tiles`` are the numbers of shards that could be equal, see `Leaf.tiles`.

    A repetition is found by identity, or by a sample of the bytes and then byte for byte, so two leaves that merely
    compare equal, such as 0.0 and -0.0, are never taken for one.
    """
    first_of: dict[int, int] = {}
    repetitions = Repetitions()
    done: list[Encoded] = []
    for index, (host, identity, count) in enumerate(zip(hosts, identities, tiles, strict=True)):
        source = first_of.setdefault(identity, index)
        if source != index and _same_layout(host, hosts[source]):
            done.append(_alias(source, done[source], same_array=True))
            continue
        one = _encode(host, count, repetitions)
        twin = None
        if one.encoding in _REPEATED and host.nbytes:
            sample = sample_of(one.payload) if one.digest is NO_DIGEST else one.digest
            twin = repetitions.find(index, one.payload, host.nbytes, sample)
        if twin is None:
            done.append(one)
        else:
            first_of[identity] = twin
            done.append(_alias(twin, done[twin], same_array=False))
    return done


def _alias(source: int, encoded: Encoded, *, same_array: bool) -> Encoded:
    if encoded.alias_of is not None:
        source = encoded.alias_of
    return Encoded("alias", _NOTHING, encoded.digest, source, same_array)


def _same_layout(one: Host, other: Host) -> bool:
    return one.dtype == other.dtype and one.shape == other.shape and one.nbytes > 0


def _encode(host: Host, tiles: int, repetitions: Repetitions) -> Encoded:
    if not host.nbytes:
        return _encoded("raw", _NOTHING)
    dtype = host.dtype
    if dtype.isnative is not _IS_LITTLE or not host.flags.c_contiguous:
        host = np.ascontiguousarray(host.astype(dtype.newbyteorder("<"), copy=False))
    payload = (host if host.ndim == 1 else host.ravel()).view(_BYTE)
    itemsize = dtype.itemsize
    if payload.size > itemsize:
        if is_constant(payload, itemsize):
            return _encoded("constant", payload[:itemsize])
        if dtype.kind == "b":
            return _encoded("bits", np.packbits(payload, bitorder="little"))
    if tiles > 1 and repetitions.are_tiles(payload, tiles):
        return _encoded("tiled", payload[: payload.size // tiles])
    return _encoded("raw", payload)


def _encoded(encoding: Encoding, payload: Payload) -> Encoded:
    return Encoded(encoding, payload, digest_of(payload) if payload.size <= _DIGESTED_AT_ONCE else NO_DIGEST)


def decode(source: Leaf, payload: Payload, *, as_leaf: Leaf | None = None) -> Host:
    """The values of a leaf, a read-only view of ``payload`` where the encoding allows that.

    ``as_leaf`` is the alias, if it is one; it may have another dtype and shape of the same size than its ``source``.
    """
    host = _decode(source, payload)
    if as_leaf is None or as_leaf is source or (source.dtype, source.shape) == (as_leaf.dtype, as_leaf.shape):
        return host
    bytes_of = np.ascontiguousarray(host).reshape(-1).view(np.uint8)
    return bytes_of.view(DTYPES[as_leaf.dtype]).reshape(as_leaf.shape)


def _decode(leaf: Leaf, payload: Payload) -> Host:
    dtype, shape = _LITTLE_DTYPES[leaf.dtype], leaf.shape
    if leaf.encoding == "raw" and payload.size:
        return payload.view(dtype).reshape(shape)
    if leaf.encoding == "bits":
        bits = np.unpackbits(payload, count=leaf.elements, bitorder="little")
        return bits.view(np.bool_).reshape(shape)
    if not leaf.array_nbytes:
        return np.zeros(shape, DTYPES[leaf.dtype])
    if leaf.encoding == "constant":
        return np.broadcast_to(payload.view(dtype).reshape(()), shape)
    if leaf.is_tiled:
        payload = np.broadcast_to(payload, (leaf.tiles, payload.size)).reshape(-1)
    return payload.view(dtype).reshape(shape)
