"""Translation: one error becomes another, and neither keeps what the callers hold."""

from __future__ import annotations

import contextlib
import gc
import weakref
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from residual_store import Bundle, Settings, open_store
from residual_store.engine.faults import told_apart
from residual_store.errors import InternalError, StoreFull, Unreachable
from residual_store.translation import Translation
from tests.servers import Server
from tests.store.proxy import proxy


@pytest.fixture
def no_collector() -> Iterator[None]:
    """Without the garbage collector, a cycle stays."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def _translate(error: Exception) -> None:
    if isinstance(error, OSError):
        raise InternalError("because") from error


def test_what_is_not_translated_passes() -> None:
    """Other errors, what is no Exception, and the end without one."""
    for error in (ValueError("another"), KeyboardInterrupt()):
        with pytest.raises(type(error)) as caught, Translation(_translate):
            raise error
        assert caught.value is error
    with Translation(_translate):
        pass


def test_the_first_error_is_the_cause() -> None:
    """So that a log shows both."""
    first = OSError(28, "No space left on device")
    with pytest.raises(StoreFull) as caught, told_apart("writing"):
        raise first
    assert caught.value.__cause__ is first


def _fail(array: np.ndarray[tuple[int], np.dtype[np.float64]], url: str) -> None:
    assert array.size
    with Translation(_translate):
        raise OSError


def _lose_answer(array: np.ndarray[tuple[int], np.dtype[np.float64]], url: str) -> None:
    with open_store(url, settings=Settings(attempts=1)) as store:
        store.put("lost/kept", Bundle.of_arrays({"h": array}))


@pytest.mark.usefixtures("no_collector")
@pytest.mark.parametrize("call", [_fail, _lose_answer])
def test_an_error_that_is_gone_keeps_nothing(call: Callable[..., None], memory_server: Server) -> None:
    """Its frames held the memory of a bundle, which is used again at once and not when the collector runs."""
    array = np.arange(1000.0)
    alive = weakref.ref(array)
    with proxy(memory_server.port) as way:
        way.lose_answers = 9
        with contextlib.suppress(InternalError, Unreachable):
            call(array, way.url)
    del array
    assert alive() is None
