"""The backlog: keys are settled behind, in their order, and before that whenever somebody asks."""

from __future__ import annotations

import threading

import pytest

from residual_store.engine.backlog import Backlog
from residual_store.errors import InternalError
from tests.servers import until


class Settling:
    """Notes which keys are settled, and waits at the gate before it settles the first."""

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.at_the_gate = threading.Event()
        self.settled: list[str] = []
        self.broken: set[str] = set()

    def __call__(self, key: str) -> None:
        if threading.current_thread() is not threading.main_thread():
            self.at_the_gate.set()
            assert self.gate.wait(20)
        if key in self.broken:
            raise InternalError(f"{key} cannot be reached")
        self.settled.append(key)


def _backlog(settling: Settling, *numbers: int) -> Backlog:
    return Backlog((f"run/{number}" for number in numbers), settle=settling, retry_seconds=0.001)


def test_everything_is_settled_behind() -> None:
    """All keys are settled once and in order, and then nothing is left."""
    settling = Settling()
    settling.gate.set()
    backlog = _backlog(settling, 3, 1, 2)
    backlog.start()
    until(lambda: not len(backlog))
    backlog.close()
    assert settling.settled == ["run/1", "run/2", "run/3"]


def test_who_asks_does_not_wait_for_the_rest() -> None:
    """While the thread is held up at its first key, others are found and settled by the one who asks."""
    settling = Settling()
    backlog = _backlog(settling, *range(10))
    backlog.start()
    assert settling.at_the_gate.wait(20)
    assert backlog.first(prefix="run/", after="run/3", count=2) == ["run/4", "run/5"]
    assert backlog.first(prefix="other/", after="", count=2) == []
    assert backlog.first(prefix="run/9", after="run/1", count=2) == ["run/9"]
    backlog.settle("run/5")
    assert settling.settled == ["run/5"]
    assert "run/5" not in backlog
    assert "run/4" in backlog
    assert backlog.first(prefix="run/", after="run/3", count=2) == ["run/4", "run/6"]
    settling.gate.set()
    until(lambda: not len(backlog))
    backlog.close()
    assert settling.settled == ["run/5", *(f"run/{number}" for number in range(10) if number != 5)]


def test_a_key_that_cannot_be_settled_stays() -> None:
    """Who asks for it is told why, the others are settled meanwhile, and it is tried again until it can be."""
    settling = Settling()
    settling.gate.set()
    settling.broken = {"run/2"}
    backlog = _backlog(settling, 1, 2, 3)
    with pytest.raises(InternalError, match="run/2 cannot be reached"):
        backlog.settle("run/2")
    backlog.start()
    until(lambda: settling.settled == ["run/1", "run/3"])
    assert "run/2" in backlog
    settling.broken.clear()
    until(lambda: not len(backlog))
    backlog.close()
    assert settling.settled == ["run/1", "run/3", "run/2"]


def test_closing_ends_after_the_key_at_hand() -> None:
    """A close waits for the one key that is being settled and leaves the others."""
    settling = Settling()
    backlog = _backlog(settling, 1, 2, 3)
    backlog.start()
    assert settling.at_the_gate.wait(20)
    closing = threading.Thread(target=backlog.close)
    closing.start()
    until(lambda: backlog.closing)
    assert closing.is_alive()
    settling.gate.set()
    closing.join(20)
    assert settling.settled == ["run/1"]
    assert len(backlog) == 2
