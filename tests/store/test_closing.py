"""Closing at the end of a with statement."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from residual_store.closing import ClosedAtExit


@dataclass
class _Closed(ClosedAtExit):
    error: BaseException | None = None
    count: int = 0

    def close(self) -> None:
        self.count += 1
        if self.error is not None:
            raise self.error


def test_what_ends_the_statement_is_not_hidden_by_what_closing_raises() -> None:
    """The error of the body is the one that is raised, and it tells of the other one."""
    closed = _Closed(OSError("the disk is gone"))
    with pytest.raises(ValueError, match="a bug of the user") as raised, closed:
        raise ValueError("a bug of the user")
    assert raised.value.__notes__ == ["closing failed as well: OSError: the disk is gone"]
    with pytest.raises(OSError, match="the disk"), closed:
        pass
    assert closed.count == 2


def test_what_stops_the_program_stops_closing() -> None:
    """A second Ctrl-C, for instance, is no note."""
    with pytest.raises(KeyboardInterrupt), _Closed(KeyboardInterrupt()):
        raise ValueError
