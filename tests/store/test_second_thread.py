"""The second thread: it works beside the caller's, and keeps off the core where that one is."""

from __future__ import annotations

import os
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from types import FrameType

import pytest

from residual_store.second_thread import SecondThread, _wait_for_end


def test_it_wakes_up_off_the_core_of_the_caller() -> None:
    """Until it begins it is kept off one core, where the caller is, and from then on it may run where the caller may."""
    cores = os.sched_getaffinity(0)
    go_on = threading.Event()
    with SecondThread() as second:
        first = second.start(threading.get_native_id)
        assert first is not None
        waiting = second.start(go_on.wait)
        done = second.start(lambda: os.sched_getaffinity(0))
        left = os.sched_getaffinity(first.result())
        go_on.set()
        assert waiting is not None
        assert waiting.result()
        assert done is not None
        assert done.result() == cores
    assert first.result() != threading.get_native_id()
    assert left <= cores
    assert len(left) == max(len(cores) - 1, 1)
    assert os.sched_getaffinity(0) == cores


def test_a_caller_on_one_core_can_have_it_too() -> None:
    """There is no other core to move it to."""
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(cores)})
    try:
        with SecondThread() as second:
            done = [second.start(lambda: 7) for _ in range(2)]
            assert [one.result() for one in done if one is not None] == [7, 7]
    finally:
        os.sched_setaffinity(0, cores)


def test_an_error_is_the_caller_s() -> None:
    """It is raised where the result is asked for, and the thread goes on."""

    def fail() -> None:
        raise OSError("no room")

    with SecondThread() as second:
        failed, done = second.start(fail), second.start(lambda: 7)
        assert failed is not None
        assert done is not None
        with pytest.raises(OSError, match="no room"):
            failed.result()
        assert done.result() == 7


def test_several_callers_have_one_at_the_same_time() -> None:
    """Also the first time: what each has started is done, and no thread but the second one is moved."""
    cores = os.sched_getaffinity(0)
    with SecondThread() as second, ThreadPoolExecutor(8) as callers:
        together = threading.Barrier(8)

        def call(number: int) -> tuple[int | None, set[int]]:
            together.wait()
            done = [second.start(lambda: number) for _ in range(20)]
            return done[-1].result() if done[-1] is not None else None, os.sched_getaffinity(0)

        assert list(callers.map(call, range(8))) == [(number, cores) for number in range(8)]


def test_an_interrupt_waits_for_the_end() -> None:
    """Ctrl-C while the caller waits asks the work to stop, and is raised when the second thread does nothing any more."""
    caller, begun = threading.get_ident(), threading.Event()
    stopped, ended = threading.Event(), threading.Event()

    def work() -> None:
        begun.set()
        while not stopped.wait(0.01):
            signal.pthread_kill(caller, signal.SIGINT)
        ended.set()

    def interrupt(_: int, frame: FrameType | None) -> None:
        # Not before the caller waits, which the second thread cannot see.
        while frame is not None and frame.f_code is not _wait_for_end.__code__:
            frame = frame.f_back
        if frame is not None and not stopped.is_set():
            raise KeyboardInterrupt

    before = signal.signal(signal.SIGINT, interrupt)
    try:
        with SecondThread() as second:
            with pytest.raises(KeyboardInterrupt):
                second.beside(begun.wait, work, stop=stopped.set)
            assert ended.is_set()
    finally:
        signal.signal(signal.SIGINT, before)


def test_what_the_other_does_not_come_to_is_done_here() -> None:
    """As while it does something for another caller, and while Python ends."""
    go_on, done = threading.Event(), []
    with SecondThread() as second:
        second.start(go_on.wait)
        second.beside(lambda: done.append("mine"), lambda: done.append("theirs"), stop=go_on.set)
        assert done == ["mine", "theirs"]
        assert not go_on.is_set()
        go_on.set()


@pytest.mark.parametrize("whose", ["mine", "theirs"])
def test_an_error_of_either_is_raised_when_both_have_ended(whose: str) -> None:
    """Who goes on is asked to stop."""
    both, stopped, ended = threading.Barrier(2), threading.Event(), threading.Event()

    def fail() -> None:
        both.wait(30)
        raise OSError("no room")

    def go_on() -> None:
        both.wait(30)
        if whose == "mine":
            stopped.wait(30)
        ended.set()

    mine, theirs = (fail, go_on) if whose == "mine" else (go_on, fail)
    with SecondThread() as second, pytest.raises(OSError, match="no room"):
        second.beside(mine, theirs, stop=stopped.set)
    assert ended.is_set()
    assert stopped.is_set() == (whose == "mine")
