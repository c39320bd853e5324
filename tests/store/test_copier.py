"""The copier: many leaves copied at once, each with the digest of what stands there, and nothing goes on afterwards."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
import weakref
from collections.abc import Iterator

import numpy as np
import pytest

from residual_store.copier import Copier, Copy
from residual_store.digest import digest_of

MIB = 1 << 20


@pytest.fixture(params=[{}, {"streamed_bytes": 4 * MIB}], ids=["by-blocks", "streamed"])
def copier(request: pytest.FixtureRequest) -> Iterator[Copier]:
    """One that is closed."""
    copier = Copier(**request.param)
    yield copier
    copier.close()


def _copies(*sizes: int) -> list[Copy]:
    rng = np.random.default_rng(0)
    sources = [np.frombuffer(rng.bytes(size), np.uint8) for size in sizes]
    return [(source, np.empty_like(source), 0) for source in sources]


@pytest.mark.parametrize(
    "sizes", [(), (0,), (5, 0, 7), (17 * MIB + 3,), (64 * MIB + MIB // 2,), (9 * MIB, 1, 9 * MIB + 5, 0, MIB)]
)
def test_every_leaf_is_copied_with_its_digest(copier: Copier, sizes: tuple[int, ...]) -> None:
    """In the order of the leaves, whichever thread has copied them."""
    for _ in range(3):
        copies = _copies(*sizes)
        assert copier.copy(copies) == [digest_of(source) for source, *_ in copies]
        assert all(np.array_equal(source, target) for source, target, _ in copies)


@pytest.mark.parametrize("sizes", [(), (0, 3), (17 * MIB + 3,), (9 * MIB, 1, 9 * MIB + 5, 0, MIB)])
def test_leaves_that_stay_have_the_same_digests(copier: Copier, sizes: tuple[int, ...]) -> None:
    """Whichever thread has taken them."""
    sources = [source for source, *_ in _copies(*sizes)]
    assert copier.digests(sources) == list(map(digest_of, sources))


def test_what_is_told_covers_every_byte_once(copier: Copier) -> None:
    """Parts are told of by whoever copies them."""
    told: list[tuple[int, int]] = []
    source = np.zeros(40 * MIB + 1, np.uint8)
    copier.copy(
        [(source, np.empty_like(source), 7), (source[:3], np.empty(3, np.uint8), 7 + source.nbytes)],
        copied=lambda start, stop: told.append((start, stop)),
    )
    told.sort()
    assert [start for start, _ in told] == [7, *[stop for _, stop in told[:-1]]]
    assert told[-1][1] == 7 + source.nbytes + 3


@pytest.mark.parametrize("which", [0, 7])
def test_an_error_is_raised_and_nothing_goes_on(copier: Copier, which: int) -> None:
    """Whether it comes up in the first thread or the second; when the call returns, no thread writes any more."""
    copies = [(source, target, base) for base, (source, target, _) in enumerate(_copies(*[4 * MIB] * 8))]

    def fail(start: int, stop: int) -> None:
        if start == which:
            raise OSError("no room")

    with pytest.raises(OSError, match="no room"):
        copier.copy(copies, copied=fail)
    for _, other, _ in copies:
        other[:] = 0
    assert copier.copy(_copies(20 * MIB, 20 * MIB))
    assert not any(other.any() for _, other, _ in copies)


def test_what_no_thread_could_be_started_for_is_not_made_up_for(
    copier: Copier, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After an error in a process that has no thread to spare, the next one that starts writes nothing to the old targets."""
    copies = _copies(9 * MIB, 9 * MIB)
    for _, target, _ in copies:
        target[:] = 0

    def fail(*_: object) -> None:
        raise RuntimeError("can't start new thread")

    def stop(start: int, stop: int) -> None:
        raise OSError("no room")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", fail)
        with pytest.raises(OSError, match="no room"):
            copier.copy(copies, copied=stop)
    before = [target.copy() for _, target, _ in copies]
    threads: set[str] = set()
    while threads <= {threading.current_thread().name}:
        copier.copy(_copies(*[9 * MIB] * 4), copied=lambda *_: threads.add(threading.current_thread().name))
    assert all(np.array_equal(then, target) for then, (_, target, _) in zip(before, copies, strict=True))


def test_a_copier_keeps_no_memory(copier: Copier) -> None:
    """Without the garbage collector: what is copied must be free when the caller lets go of it."""
    gc.disable()
    try:
        copies = _copies(9 * MIB, 5, 9 * MIB)
        targets = [weakref.ref(target) for _, target, _ in copies]
        copier.copy(copies)
        copier.digests([source for source, *_ in copies])
        del copies
        assert [target() for target in targets] == [None] * 3
    finally:
        gc.enable()


_FORK = """
import os
import numpy as np
from residual_store.copier import Copier

copies = [(np.full(9 << 20, i, np.uint8), np.empty(9 << 20, np.uint8), 0) for i in range(4)]
copier = Copier()
wanted = copier.copy(copies)
child = os.fork()
if child == 0:
    os._exit(0 if copier.copy(copies) == wanted else 1)
raise SystemExit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


def test_a_forked_process_has_a_thread_of_its_own() -> None:
    """The thread of the parent is not waited for."""
    assert subprocess.run([sys.executable, "-W", "ignore", "-c", _FORK], timeout=60).returncode == 0
