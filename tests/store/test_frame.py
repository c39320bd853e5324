"""The frame: what is encoded is decoded however it is cut into pieces, and nothing else is."""

from __future__ import annotations

import contextlib
import itertools
import struct

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from residual_store import Bundle, Settings
from residual_store.errors import InvalidFrame, InvalidManifest, TooLarge
from residual_store.frame import FrameReader, aligned_empty, frame_head, frame_nbytes
from tests.server.raw import frame_of
from tests.store.bundles import assert_equal, noise
from tests.store.strategies import bundles

_HEADER = struct.Struct("<4sIQ")


def _read(pieces: list[bytes], *, total: int | None = None, limits: Settings | None = None) -> Bundle:
    """Feed the pieces one by one, as a server does."""
    reader = FrameReader(limits or Settings(), total=total)
    for piece in pieces:
        rest = reader.feed(piece)
        if reader.awaits_memory:
            assert reader.manifest is not None
            reader.place(aligned_empty(reader.manifest.nbytes))
            rest = reader.feed(rest)
        assert not rest
    return reader.bundle()


def _cut(frame: bytes, cuts: list[int]) -> list[bytes]:
    edges = [0, *sorted(cut % (len(frame) + 1) for cut in cuts), len(frame)]
    return [frame[start:stop] for start, stop in itertools.pairwise(edges)]


@settings(deadline=None, max_examples=150)
@given(bundles(), st.lists(st.integers(0, 1 << 20), max_size=12))
def test_a_frame_may_come_in_any_pieces(bundle: Bundle, cuts: list[int]) -> None:
    """A frame cut anywhere, empty pieces included, is the bundle that it was made of."""
    frame = frame_of(bundle)
    assert_equal(_read(_cut(frame, cuts), total=len(frame)), bundle)


@settings(deadline=None, max_examples=60)
@given(bundles())
def test_a_frame_is_as_long_as_it_says(bundle: Bundle) -> None:
    """The parts add up to the announced length, leaves start at multiples of 64, and encoding is repeatable."""
    head = frame_head(bundle.manifest)
    assert len(head) % 4096 == 0
    assert len(frame_of(bundle)) == frame_nbytes(head, bundle.manifest)
    assert all(leaf.offset % 64 == 0 for leaf in bundle.manifest.leaves)
    assert frame_of(_read([frame_of(bundle)])) == frame_of(bundle)


@settings(deadline=None, max_examples=60)
@given(bundles(), st.data())
def test_a_frame_that_ends_early_is_refused(bundle: Bundle, data: st.DataObject) -> None:
    """No strict beginning of a frame is a frame."""
    frame = frame_of(bundle)
    end = data.draw(st.integers(0, len(frame) - 1))
    with pytest.raises(InvalidFrame, match="ends before"):
        _read([frame[:end]])


@settings(deadline=None, max_examples=60)
@given(bundles(), st.binary(min_size=1, max_size=9), st.booleans())
def test_a_frame_that_goes_on_is_refused(bundle: Bundle, more: bytes, apart: bool) -> None:
    """Bytes after the last leaf are refused, in the last piece or after it."""
    frame = frame_of(bundle)
    with pytest.raises(InvalidFrame, match="goes on"):
        _read([frame, more] if apart else [frame + more])


@settings(deadline=None, max_examples=100)
@given(bundles(), st.data())
def test_a_changed_byte_of_a_leaf_is_refused(bundle: Bundle, data: st.DataObject) -> None:
    """A digest does not match any more, and the error names the leaf."""
    frame = bytearray(frame_of(bundle))
    stored = [leaf for leaf in bundle.manifest.leaves if leaf.nbytes]
    if not stored:
        return
    leaf = data.draw(st.sampled_from(stored))
    place = len(frame) - bundle.manifest.nbytes + leaf.offset + data.draw(st.integers(0, leaf.nbytes - 1))
    frame[place] ^= data.draw(st.integers(1, 255))
    with pytest.raises(InvalidFrame) as caught:
        _read([bytes(frame)])
    assert (caught.value.fields["leaf"], caught.value.fields["index"]) == (leaf.path, leaf.index)


@settings(deadline=None, max_examples=300)
@given(bundles(), st.data())
def test_a_changed_byte_of_the_head_never_crashes(bundle: Bundle, data: st.DataObject) -> None:
    """Whatever byte before the leaves changes, the frame is refused as such or is read as one."""
    frame = bytearray(frame_of(bundle))
    place = data.draw(st.integers(0, len(frame_head(bundle.manifest)) - 1))
    frame[place] ^= data.draw(st.integers(1, 255))
    leaves = len(bundle.manifest.leaves)
    with contextlib.suppress(InvalidFrame, InvalidManifest, TooLarge):
        leaves = len(_read([bytes(frame)], limits=Settings(max_bundle_bytes=1 << 20)).manifest.leaves)
    assert leaves == len(bundle.manifest.leaves)


@settings(deadline=None, max_examples=300)
@given(st.binary(max_size=9000))
def test_random_bytes_are_no_frame(body: bytes) -> None:
    """Any other bytes are refused with an error of this project, with and without the magic."""
    for content in (body, b"RSB1\0\0\0\0" + body, _HEADER.pack(b"RSB1", 0, len(body)) + body):
        with pytest.raises((InvalidFrame, InvalidManifest, TooLarge)):
            _read([content.ljust(8192, b"\0")])


@pytest.mark.parametrize("difference", [-4096, -1, 1, 1 << 40])
def test_a_wrong_length_is_refused_before_the_leaves(difference: int) -> None:
    """Where the announced length is not that of the manifest, no memory for leaves is asked for."""
    frame = frame_of(noise(1 << 20))
    reader = FrameReader(Settings(), total=len(frame) + difference)
    with pytest.raises(InvalidFrame, match="manifest says"):
        reader.feed(frame[:4096])
    assert not reader.awaits_memory


def test_headers_are_checked_at_once() -> None:
    """Magic, flags and the length of the manifest are refused after 16 bytes."""
    cases = [
        (_HEADER.pack(b"RSB2", 0, 10), InvalidFrame),
        (b"\x80\x04\x95" + bytes(13), InvalidFrame),  # a pickle
        (_HEADER.pack(b"RSB1", 1, 10), InvalidFrame),
        (_HEADER.pack(b"RSB1", 0, 1 << 63), TooLarge),
        (_HEADER.pack(b"RSB1", 0, (1 << 64) - 1), TooLarge),
        (_HEADER.pack(b"RSB1", 0, (64 << 20) + 1), TooLarge),
    ]
    for header, kind in cases:
        with pytest.raises(kind):
            FrameReader(Settings()).feed(header)


def test_a_manifest_may_end_anywhere_in_a_page() -> None:
    """With no padding, with one byte of it and with all but one, the frame is read."""
    seen = set[int]()
    for length in range(3500, 3900):
        bundle = Bundle.of_arrays({"h": np.arange(9)}, user={"fill": "x" * length})
        frame = frame_of(bundle)
        seen.add(-(_HEADER.size + _HEADER.unpack(frame[: _HEADER.size])[2]) % 4096)
        assert_equal(_read([frame]), bundle)
    assert seen >= {0, 1, 4095}
