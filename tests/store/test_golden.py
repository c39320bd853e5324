"""Golden files of format version 1: today's code reads what the first release wrote, and writes the same bytes."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from residual_store import open_store
from residual_store.frame import FrameReader, aligned_empty
from tests.data.make_golden import FINGERPRINT, FOLDER, PROGRAM, SETTINGS, frame, golden_bundles
from tests.store.bundles import assert_equal

_BUNDLES = golden_bundles()


@pytest.mark.parametrize("name", _BUNDLES)
def test_a_golden_frame_is_read(name: str) -> None:
    """Every field of the manifest and every bit of the leaves are what they were."""
    reader = FrameReader(SETTINGS)
    rest = reader.feed((FOLDER / f"{name}.frame").read_bytes())
    assert reader.manifest is not None
    reader.place(aligned_empty(reader.manifest.nbytes))
    reader.feed(rest)
    assert reader.manifest == _BUNDLES[name].manifest
    assert_equal(reader.bundle(), _BUNDLES[name])


@pytest.mark.parametrize("name", _BUNDLES)
def test_a_golden_frame_is_written(name: str) -> None:
    """Encoding the same bundle gives the same bytes."""
    assert frame(_BUNDLES[name]) == (FOLDER / f"{name}.frame").read_bytes()


def test_a_golden_root_is_read(tmp_path: Path) -> None:
    """A root of the first release, without its index, is listed and read bit by bit, whatever the limits are today."""
    shutil.copytree(FOLDER / "root", tmp_path / "root")
    for settings in (SETTINGS, None):
        with open_store((tmp_path / "root").as_uri(), settings=settings) as store:
            assert [entry.key for entry in store.list().entries] == [
                f"golden/{name}" for name in sorted(_BUNDLES)
            ]
            for name, bundle in _BUNDLES.items():
                assert_equal(store.get(f"golden/{name}"), bundle)
                for leaf in bundle.manifest.leaves:
                    got = store.get_leaf(f"golden/{name}", leaf.index)
                    assert got.tobytes() == bundle.array(leaf.index).tobytes()
            assert store.get_program(FINGERPRINT) == PROGRAM
