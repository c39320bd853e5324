"""Programs: below a root they are stored once, checked when read, and there after a restart; in memory they have a budget."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from residual_store import Bundle, Manifest, Settings, Store, open_store
from residual_store.bundle import digest_of
from residual_store.errors import DataLoss, NotFound, StoreFull, TooLarge

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


@pytest.mark.parametrize("url", ["memory://", "file"])
def test_another_program_under_the_fingerprint_is_not_that_of_the_bundle(tmp_path: Path, url: str) -> None:
    """The first one stays, whoever has put it there, and the receipt does not take it for the right one."""
    with open_store(tmp_path.as_uri() if url == "file" else url) as store:
        bundle = naming(FINGERPRINT, b"program")
        assert not store.put("run/a", bundle).has_program
        store.put_program(FINGERPRINT, b"garbage")
        store.put_program(FINGERPRINT, b"program")
        assert not store.put("run/a", bundle).has_program
        assert store.put("run/b", naming(FINGERPRINT, b"garbage")).has_program


# In memory, where they have a budget


def fingerprint(number: int) -> str:
    return f"{number:064x}"


def naming(program: str, content: bytes = bytes(25)) -> Bundle:
    """A bundle without leaves that names a program."""
    return Bundle(manifest=Manifest(fingerprint=program, program=digest_of(content)), payloads=())


def test_programs_in_memory_that_no_bundle_names_make_room() -> None:
    """They have a quarter of host_bytes; of those that nobody needs, the longest unused go first, and no more than must."""
    with open_store("memory://", settings=Settings(host_bytes=400)) as store:
        for number in range(4):
            store.put_program(fingerprint(number), bytes(25))
        store.put("run/a", naming(fingerprint(0)))
        store.get_program(fingerprint(1))
        store.put_program(fingerprint(4), bytes(26))
        assert _held(store, range(5)) == [0, 1, 4]
        store.delete("run/a")
        store.put_program(fingerprint(5), bytes(50))
        assert _held(store, range(6)) == [4, 5]


def _held(store: Store, numbers: Iterable[int]) -> list[int]:
    held = []
    for number in numbers:
        with contextlib.suppress(NotFound):
            store.get_program(fingerprint(number))
            held.append(number)
    return held


def test_programs_in_memory_that_bundles_name_stay() -> None:
    """One that does not fit beside them is refused with what is missing, and fits once the bundle is gone."""
    with open_store("memory://", settings=Settings(host_bytes=400)) as store:
        store.put_program(fingerprint(0), bytes(60))
        assert store.put("run/a", naming(fingerprint(0), bytes(60))).has_program
        with pytest.raises(StoreFull, match=r"leave 40 of 100 bytes free.*host_bytes") as caught:
            store.put_program(fingerprint(1), bytes(41))
        assert caught.value.fields == {"needed_bytes": 41, "free_bytes": 40}
        assert _held(store, range(2)) == [0]
        assert store.usage().host_program_bytes == 60
        store.delete("run/a")
        store.put_program(fingerprint(1), bytes(41))
        assert _held(store, range(2)) == [1]


def test_a_program_that_a_receipt_speaks_of_is_there() -> None:
    """While many threads store, name and drop programs in too little memory, a bundle whose receipt says so has its program."""

    def work(number: int) -> None:
        for step in range(50):
            program, key = fingerprint(8 * step + number), f"run/{number}"
            store.put_program(program, bytes(25))
            if not store.put(key, naming(program), if_exists="replace").has_program:
                with contextlib.suppress(StoreFull):
                    store.put_program(program, bytes(25))
                    assert store.get_program(program) == bytes(25)
                continue
            assert store.get_program(program) == bytes(25)

    with (
        open_store("memory://", settings=Settings(host_bytes=1000)) as store,
        ThreadPoolExecutor(8) as threads,
    ):
        list(threads.map(work, range(8)))
