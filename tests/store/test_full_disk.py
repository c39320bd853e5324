"""A full disk: what does not fit is refused, and what was there stays."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from residual_store import Settings
from residual_store.engine.local import LocalStore
from residual_store.errors import InternalError, StoreFull
from tests.store.bundles import assert_equal, noise
from tests.store.roots import data_files, leftovers


def _at(root: Path) -> LocalStore:
    return LocalStore.at(root.as_uri(), settings=Settings())


@pytest.fixture
def full_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 16 MiB; needs the right to mount."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=16m", "tmpfs", folder], check=False, capture_output=True
    )
    if mounted.returncode:
        pytest.skip("this user may not mount a file system")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", folder], check=True)


@pytest.mark.parametrize("key", ["run/a", "run/b"])
def test_a_full_disk_keeps_the_old_bundle(full_disk: Path, key: str) -> None:
    """What does not fit is refused with needed and free bytes and leaves nothing; the old bundle is whole."""
    old, new = noise(7 << 20), noise(11 << 20, seed=1)
    with _at(full_disk) as store:
        store.put("run/a", old)
        before = data_files(full_disk, "run/a")
        with pytest.raises(StoreFull) as caught:
            store.put(key, new, if_exists="replace")
        assert_equal(store.get("run/a"), old)
        assert data_files(full_disk, "run/a") == before
        assert leftovers(full_disk, {"run/a"}) == []
        needed, free = caught.value.fields["needed_bytes"], caught.value.fields["free_bytes"]
        assert isinstance(needed, int)
        assert isinstance(free, int)
        assert needed >= 11 << 20 > free
        store.delete("run/a")
        smaller = noise(8 << 20, seed=2)
        store.put("run/b", smaller)
        assert_equal(store.get("run/b"), smaller)


def test_a_disk_without_a_free_byte(full_disk: Path) -> None:
    """Whatever needs room is refused as StoreFull, reading goes on, and deletion makes room again."""
    with _at(full_disk) as store:
        bundle = noise(1 << 20)
        store.put("run/a", bundle)
        _fill(full_disk / "filler")
        for refused in (
            lambda: store.put("run/b", noise(10)),
            lambda: store.put_program("a" * 64, bytes(100_000)),
            lambda: store.touch("run/a", ttl=500),
        ):
            with pytest.raises(StoreFull):
                refused()
        assert_equal(store.get("run/a"), bundle)
        assert [entry.key for entry in store.list().entries] == ["run/a"]
        (full_disk / "filler").unlink()
        store.put("run/b", noise(10))
        assert store.touch("run/a", ttl=500).expires_at is not None


def test_a_full_disk_costs_no_index(full_disk: Path) -> None:
    """A root that cannot be opened now says why, keeps no descriptor, and has all that it had when there is room again."""
    bundle = noise(1 << 20)
    with _at(full_disk) as store:
        store.put("run/a", bundle, ttl=1000)
        expires_at = store.touch("run/a", ttl=300).expires_at
    _fill(full_disk / "filler")
    before = (full_disk / "index.sqlite").read_bytes()
    descriptors = psutil.Process().num_fds()
    for _ in range(3):
        with pytest.raises((StoreFull, InternalError), match="room on the disk"):
            _at(full_disk)
    assert psutil.Process().num_fds() == descriptors
    assert (full_disk / "index.sqlite").read_bytes() == before
    (full_disk / "filler").unlink()
    with _at(full_disk) as store:
        assert store.stat("run/a").expires_at == expires_at
        assert_equal(store.get("run/a"), bundle)


def _fill(path: Path) -> None:
    with path.open("wb", buffering=0) as file:
        for size in (1 << 20, 4096, 1):
            with contextlib.suppress(OSError):
                while file.write(bytes(size)):
                    pass
