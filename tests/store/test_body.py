"""The body of a put: the frame, whose digests are taken when it is sent, and not again when it is sent again."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from residual_store.body import frame_body
from residual_store.bundle import Bundle
from residual_store.copier import Copier
from residual_store.errors import InvalidFrame
from residual_store.frame import FrameReader
from residual_store.settings import Settings

MIB = 1 << 20


def _bundle(array: np.ndarray[tuple[int, ...], np.dtype[np.uint8]]) -> Bundle:
    return Bundle.of_arrays({"large": array, "small": np.arange(3)})


def _sent(bundle: Bundle, moved: list[int]) -> bytes:
    body = frame_body(bundle, copier=Copier(), moved=moved.append)
    frame = b"".join(body.parts())
    assert b"".join(body.parts()) == frame
    assert len(frame) == body.nbytes
    return frame


@pytest.mark.parametrize("is_sealed", [False, True])
def test_the_parts_are_the_frame(is_sealed: bool) -> None:
    """As long as was announced, whether there are digests already or not, and a reader finds them right."""
    bundle = _bundle(np.random.default_rng(0).integers(0, 256, 9 * MIB, np.uint8))
    moved: list[int] = []
    reader = FrameReader(Settings())
    rest = reader.feed(_sent(bundle.sealed() if is_sealed else bundle, moved))
    reader.place(np.empty(bundle.manifest.nbytes, np.uint8))
    reader.feed(rest)
    assert reader.bundle().manifest == bundle.sealed().manifest
    assert moved == sorted(moved[: len(moved) // 2]) * 2
    assert moved[-1] == bundle.manifest.nbytes


def test_digests_are_taken_when_it_is_sent() -> None:
    """They are those of the bytes then, and a body that is sent again keeps them: what has changed meanwhile does not fit."""
    array = np.random.default_rng(0).integers(0, 256, 9 * MIB, np.uint8)
    bundle = _bundle(array)
    body = frame_body(bundle, copier=Copier(), moved=lambda nbytes: None)
    array[0] ^= 1
    head, *_ = body.parts()
    assert bundle.sealed().manifest.leaves[0].digest in bytes(head)
    array[0] ^= 1
    again, *_ = body.parts()
    assert again == head


def test_a_leaf_of_another_length_is_refused() -> None:
    """Before a byte of it goes out."""
    bundle = _bundle(np.zeros(9 * MIB, np.uint8) + np.arange(9 * MIB).astype(np.uint8))
    short = dataclasses.replace(bundle, payloads=(bundle.payloads[0][:-1], bundle.payloads[1]))
    body = frame_body(short, copier=Copier(), moved=lambda nbytes: None)
    with pytest.raises(InvalidFrame, match="large"):
        body.parts()
