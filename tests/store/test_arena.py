"""Arenas: addresses that nobody else has, and the shared arena between processes."""

from __future__ import annotations

import fcntl
import mmap
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, strategies as st

from residual_store.arena import PAGE, AddressSpace, NoRoom
from residual_store.idle_table import TABLE_BYTES, IdleTable
from residual_store.neighbour import Neighbour, NotShared
from residual_store.place import BlockName, Place
from residual_store.segments import SegmentPool
from residual_store.shared_arena import ARENA, NONCE, SharedArena

MIB = 1 << 20


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 40)), max_size=60))
def test_parts_of_an_address_space_never_overlap(steps: list[tuple[bool, int]]) -> None:
    """Whatever is taken and given back in whatever order, no two parts meet, and all given back is one part again."""
    space, taken = AddressSpace(100), []
    for take, size in steps:
        if take and (start := space.take(size)) is not None:
            taken.append((start, size))
        elif not take and taken:
            space.give(*taken.pop(size % len(taken)))
        bytes_of = [byte for start, size in taken for byte in range(start, start + size)]
        assert len(bytes_of) == len(set(bytes_of))
        assert all(0 <= byte < 100 for byte in bytes_of)
    for part in taken:
        space.give(*part)
    assert space.take(100) == 0


def test_a_block_that_was_withdrawn_is_not_one_at_the_start_of_the_arena() -> None:
    """Where it starts is 0 then, and a client that reads it at that moment must not fill the table and what comes behind it."""
    table = IdleTable(mmap.mmap(-1, TABLE_BYTES))
    table.offer(TABLE_BYTES, MIB, "run")
    assert list(table.matching(MIB, MIB, "run")) == [TABLE_BYTES]
    assert table.has(TABLE_BYTES, MIB, "run")
    table.withdraw(TABLE_BYTES)
    assert not list(table.matching(MIB, MIB, "run"))
    assert not table.has(TABLE_BYTES, MIB, "run")
    assert not table.has(0, MIB, "run")


@pytest.fixture
def base(tmp_path: Path) -> Iterator[Path]:
    """A directory in memory where the machine has one."""
    shm = Path("/dev/shm")
    folder = shm / f"residual-store-test-{os.getpid()}" if shm.is_dir() else tmp_path / "shm"
    folder.mkdir()
    yield folder
    shutil.rmtree(folder)


@pytest.fixture
def arena(base: Path) -> Iterator[SharedArena]:
    """The server's end."""
    arena = SharedArena(64 * MIB, base=base)
    yield arena
    arena.close()


def _described(arena: SharedArena) -> dict[str, str]:
    return {"directory": str(arena.directory), "nonce": arena.nonce.hex()}


def _near(arena: SharedArena) -> Neighbour:
    return Neighbour(_described(arena), base=arena.directory.parent)


def _place_of(pool: SegmentPool, nbytes: int = MIB) -> tuple[Place, np.ndarray]:
    segment = pool.allocate(nbytes)
    assert segment.place is not None
    return segment.place, segment.memory


def _take(pool: SegmentPool, near: Neighbour, nbytes: int = MIB) -> tuple[BlockName, np.ndarray]:
    """An idle block of the run "run", taken by a client."""
    pool.allocate(nbytes, run="run")
    pool.settle()
    taken = near.take(nbytes, "run")
    assert taken is not None
    return taken


def _borrower(arena: SharedArena, place: Place, then: str) -> subprocess.Popen[str]:
    """Another process that borrows a segment as ``view``, says so, and does what ``then`` says."""
    code = (
        "import resource, sys; from pathlib import Path\n"
        "from residual_store.neighbour import Neighbour; from residual_store.place import Place\n"
        "resource.setrlimit(resource.RLIMIT_CORE, (0, 0))\n"
        "directory, nonce, text = sys.argv[1:]\n"
        "near = Neighbour({'directory': directory, 'nonce': nonce}, base=Path(directory).parent)\n"
        "view = near.borrow(Place.of_text(text)); assert view is not None\n"
        f"print('held', flush=True); {then}\n"
    )
    command = [sys.executable, "-c", code, *_described(arena).values(), place.to_text()]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


class TestNeighbour:
    """The two ends of a shared arena."""

    def test_both_see_the_same_bytes(self, arena: SharedArena) -> None:
        """What one side writes the other reads, without a copy, each way."""
        pool = SegmentPool(total=8 * MIB, arena=arena)
        near = _near(arena)
        block, written = _take(pool, near)
        written[:] = 5
        segment = pool.adopt(block, MIB, run="run")
        assert segment is not None
        assert segment.memory.min() == 5
        assert segment.place is not None
        del written
        segment.memory[7] = 9
        read = near.borrow(segment.place)
        assert read is not None
        assert (read[7], read.nbytes, read.ctypes.data % PAGE) == (9, MIB, 0)

    def test_an_idle_block_is_taken_once(self, arena: SharedArena) -> None:
        """Of two clients one gets it, and neither the pool nor another run does while that one has it."""
        pool = SegmentPool(total=MIB, arena=arena)
        near, other = _near(arena), _near(arena)
        block, written = _take(pool, near)
        assert other.take(MIB, "run") is None
        assert near.take(MIB, "run") is None
        with pytest.raises(NoRoom):
            pool.allocate(MIB)
        pool.trim(idle_seconds=0)
        written[:] = 7
        del written
        assert other.take(MIB, "another") is None
        taken = other.take(MIB, "run")
        assert taken is not None
        assert taken[0].start == block.start
        assert taken[1].max() == 7, "it was neither trimmed nor used while it was taken"

    def test_only_what_a_client_has_is_adopted(self, arena: SharedArena) -> None:
        """A block that nobody has taken, of another run, too short, in use, or of another arena is refused."""
        pool = SegmentPool(total=8 * MIB, arena=arena)
        near = _near(arena)
        block, written = _take(pool, near)
        elsewhere = replace(block, arena="residual-store-0000000000000000")
        assert pool.adopt(elsewhere, MIB, run="run") is None
        assert pool.adopt(block, MIB, run="another") is None
        assert pool.adopt(block, 2 * MIB, run="run") is None
        assert pool.adopt(replace(block, start=block.start + PAGE), MIB, run="run") is None
        segment = pool.adopt(block, MIB, run="run")
        assert segment is not None
        assert pool.adopt(block, MIB, run="run") is None
        del written, segment
        pool.settle()
        assert pool.adopt(block, MIB, run="run") is None, "it is idle, and nobody has taken it"
        assert near.take(MIB, "run") is not None

    def test_a_filled_block_can_be_shared(self, arena: SharedArena) -> None:
        """Who has filled it keeps its memory, others read it, and it is used for nothing else before all have let go."""
        pool = SegmentPool(total=MIB, arena=arena)
        near, other = _near(arena), _near(arena)
        block, written = _take(pool, near)
        written[:] = 5
        segment = pool.adopt(block, MIB, run="run")
        assert segment is not None
        assert segment.place is not None
        assert other.borrow(segment.place) is None
        near.share(block)
        read = other.borrow(segment.place)
        assert read is not None
        assert read.min() == 5
        del segment, read
        with pytest.raises(NoRoom):
            pool.allocate(MIB)
        assert written.min() == 5
        del written
        assert pool.allocate(MIB).place is not None

    def test_a_borrowed_segment_is_read_only(self, arena: SharedArena) -> None:
        """By its flag, and by the page tables: whoever writes through the pointer dies."""
        place, _memory = _place_of(SegmentPool(total=8 * MIB, arena=arena))
        read = _near(arena).borrow(place)
        assert read is not None
        with pytest.raises(ValueError, match="read-only"):
            read[0] = 1
        overwrite = "import ctypes; ctypes.memset(view.ctypes.data, 1, 1)"
        with _borrower(arena, place, overwrite) as child:
            assert child.wait() == -signal.SIGSEGV

    def test_a_segment_is_not_used_again_while_it_is_borrowed(self, arena: SharedArena) -> None:
        """The pool waits for the last view of the other side, and takes the memory then."""
        pool = SegmentPool(total=MIB, arena=arena)
        place, memory = _place_of(pool)
        memory[:] = 3
        read = _near(arena).borrow(place)
        assert read is not None
        view = read[100:200]
        del memory, read
        with pytest.raises(NoRoom):
            pool.allocate(MIB)
        assert view.min() == 3
        del view
        pool.allocate(MIB).memory[:] = 4

    def test_a_segment_that_has_become_another_is_not_lent(self, arena: SharedArena) -> None:
        """Its ticket is another, so who comes late gets nothing, and neither does who comes after its end."""
        pool = SegmentPool(total=MIB, arena=arena)
        place, memory = _place_of(pool)
        near = _near(arena)
        del memory
        assert pool.usage.held == 0
        assert near.borrow(place) is None
        _, memory = _place_of(pool)
        assert near.borrow(place) is None
        del memory
        pool.trim(idle_seconds=0)
        assert near.borrow(place) is None

    def test_a_place_outside_is_refused(self, arena: SharedArena) -> None:
        """A place of another arena, before its start or behind its end is no place."""
        place, _memory = _place_of(SegmentPool(total=8 * MIB, arena=arena))
        near = _near(arena)
        for offset, nbytes, name in [
            (0, MIB, place.arena),
            (place.offset, 65 * MIB, place.arena),
            (place.offset, MIB, "residual-store-0000000000000000"),
        ]:
            wrong = Place(arena=name, offset=offset, nbytes=nbytes, ticket=place.ticket)
            assert near.borrow(wrong) is None

    def test_a_dead_borrower_holds_nothing(self, arena: SharedArena) -> None:
        """When the process of a borrower is killed, its segments come back."""
        pool = SegmentPool(total=MIB, arena=arena)
        place, memory = _place_of(pool)
        with _borrower(arena, place, "sys.stdin.read()") as child:
            assert child.stdout is not None
            assert child.stdout.readline() == "held\n"
            del memory
            assert pool.usage.held == MIB
            child.kill()
            child.wait()
            assert pool.usage.held == 0

    def test_who_is_no_neighbour_is_told_why(self, arena: SharedArena, base: Path) -> None:
        """Another host, another user, a path that is none of ours: each with its own reason."""
        described = _described(arena)
        name = arena.directory.name
        elsewhere = {**described, "directory": str(base / "residual-store-0123456789abcdef")}
        cases = {
            "another host": [{**described, "nonce": "00" * 16}, elsewhere],
            "are not in": [{**described, "directory": f"/etc/{name}"}, {**described, "directory": "/etc"}],
            "shares no memory": [None],
        }
        for reason, others in cases.items():
            for other in others:
                with pytest.raises(NotShared, match=reason):
                    Neighbour(other, base=base)
        arena.directory.chmod(0o755)
        with pytest.raises(NotShared, match="another user"):
            Neighbour(described, base=base)

    def test_a_link_is_not_followed(self, arena: SharedArena, base: Path) -> None:
        """An arena that is a symbolic link to another file is not mapped."""
        precious = base / "precious"
        precious.write_bytes(b"x" * MIB)
        (arena.directory / ARENA).unlink()
        (arena.directory / ARENA).symlink_to(precious)
        with pytest.raises(NotShared, match="cannot be mapped"):
            Neighbour(_described(arena), base=base)


class TestSharedArena:
    """The server's files."""

    def test_nobody_else_can_enter(self, arena: SharedArena) -> None:
        """The directory has mode 0700 and its files 0600."""
        modes = [path.stat().st_mode & 0o777 for path in (arena.directory, *arena.directory.iterdir())]
        assert modes == [0o700, 0o600, 0o600]

    def test_what_a_dead_server_left_is_removed(self, base: Path) -> None:
        """By the next one, and the directory of a living one is not."""
        dead, living = SharedArena(MIB, base=base), SharedArena(MIB, base=base)
        assert dead._guard is not None
        fcntl.flock(dead._guard, fcntl.LOCK_UN)
        new = SharedArena(MIB, base=base)
        assert sorted(base.iterdir()) == sorted([living.directory, new.directory])
        assert (living.directory / NONCE).read_bytes() == living.nonce

    def test_a_close_leaves_nothing(self, base: Path) -> None:
        """The files go, views stay readable, and a second close is no error."""
        arena = SharedArena(4 * MIB, base=base)
        memory = SegmentPool(total=MIB, arena=arena).allocate(MIB).memory
        memory[:] = 6
        arena.close()
        arena.close()
        assert list(base.iterdir()) == []
        assert memory.max() == 6

    def test_memory_goes_back(self, arena: SharedArena) -> None:
        """What is trimmed takes no memory in the file system any more."""
        pool = SegmentPool(total=32 * MIB, arena=arena)
        pool.allocate(16 * MIB).memory[:] = 1
        blocks = lambda: (arena.directory / ARENA).stat().st_blocks * 512  # noqa: E731
        assert blocks() >= 16 * MIB
        pool.trim(idle_seconds=0)
        assert blocks() < MIB

    def test_a_full_file_system_is_no_room(self, arena: SharedArena, monkeypatch: pytest.MonkeyPatch) -> None:
        """Memory is reserved before it is handed out; where there is none, a segment comes from the heap."""

        def full(*_: object) -> None:
            raise OSError(28, "No space left on device")

        pool = SegmentPool(total=32 * MIB, arena=arena)
        monkeypatch.setattr(os, "posix_fallocate", full)
        with pytest.raises(NoRoom, match="left"):
            arena.populate(0, MIB)
        segment = pool.allocate(MIB)
        segment.memory[:] = 1
        assert segment.place is None
        assert pool.usage.held == MIB
