"""Programs below a root: stored once, checked when read, and there after a restart."""

from __future__ import annotations

from pathlib import Path

import pytest

from residual_store import Settings, open_store
from residual_store.errors import DataLoss, NotFound, TooLarge

FINGERPRINT = "0f" * 32


def test_a_program_outlives_its_store(tmp_path: Path) -> None:
    """It is a file of its own below the root, and another process finds it."""
    with open_store(tmp_path.as_uri()) as store:
        store.put_program(FINGERPRINT, b"program")
    assert [path.name for path in (tmp_path / "programs").iterdir()] == [FINGERPRINT]
    with open_store(tmp_path.as_uri()) as store:
        assert store.get_program(FINGERPRINT) == b"program"


@pytest.mark.parametrize("place", [0, 15, 16, 20, -1])
def test_a_damaged_program_is_never_given(tmp_path: Path, place: int) -> None:
    """A program is code: one flipped bit of it or of its digest, or a cut, is a loss."""
    with open_store(tmp_path.as_uri()) as store:
        store.put_program(FINGERPRINT, b"program")
        path = tmp_path / "programs" / FINGERPRINT
        whole = bytearray(path.read_bytes())
        path.write_bytes(whole[:place])
        with pytest.raises(DataLoss, match=FINGERPRINT):
            store.get_program(FINGERPRINT)
        whole[place] ^= 1
        path.write_bytes(whole)
        with pytest.raises(DataLoss, match=FINGERPRINT):
            store.get_program(FINGERPRINT)


def test_a_damaged_program_can_be_stored_again(tmp_path: Path) -> None:
    """What the error advises works: remove it and store it once more."""
    with open_store(tmp_path.as_uri()) as store:
        store.put_program(FINGERPRINT, b"program")
        (tmp_path / "programs" / FINGERPRINT).unlink()
        with pytest.raises(NotFound):
            store.get_program(FINGERPRINT)
        store.put_program(FINGERPRINT, b"program")
        assert store.get_program(FINGERPRINT) == b"program"


def test_a_program_has_a_largest_size(tmp_path: Path) -> None:
    """max_program_bytes holds to the byte, and what is above it leaves nothing."""
    with open_store(tmp_path.as_uri(), settings=Settings(max_program_bytes=10)) as store:
        with pytest.raises(TooLarge):
            store.put_program(FINGERPRINT, bytes(11))
        with pytest.raises(NotFound):
            store.get_program(FINGERPRINT)
        store.put_program(FINGERPRINT, bytes(10))
