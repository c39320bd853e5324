"""Settings: one table, each with unit and reason, read from the environment."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest

from residual_store import Settings
from residual_store.errors import InvalidOption


@pytest.mark.parametrize("entry", fields(Settings), ids=lambda entry: entry.name)
def test_every_setting_is_explained_and_can_be_set(entry: object) -> None:
    """It has a unit and a reason, and ``RESIDUAL_STORE_<NAME>`` sets it in its own type."""
    name, metadata = entry.name, entry.metadata  # type: ignore[attr-defined]
    assert metadata["unit"]
    assert len(metadata["reason"]) > 10
    default = getattr(Settings(), name)
    found = getattr(Settings.from_environment({f"RESIDUAL_STORE_{name.upper()}": "17"}), name)
    assert (found, type(found)) == (17, type(default))


def test_what_is_given_goes_before_the_environment() -> None:
    """An option of the command line beats a variable, a variable beats the default, and None is nothing."""
    environment = {"RESIDUAL_STORE_HOST_BYTES": "1_000", "RESIDUAL_STORE_ATTEMPTS": "9", "OTHER": "x"}
    settings = Settings.from_environment(environment, host_bytes=5, attempts=None)
    assert (settings.host_bytes, settings.attempts) == (5, 9)
    assert Settings.from_environment({}) == Settings()


@pytest.mark.parametrize("text", ["", "many", "-1", "nan", "1.5", "0x10", "1e3", "inf"])
def test_a_value_that_is_none_is_refused(text: str) -> None:
    """What is no whole number of 0 or more is refused, with the name of the variable."""
    with pytest.raises(InvalidOption, match="RESIDUAL_STORE_MAX_LEAVES"):
        Settings.from_environment({"RESIDUAL_STORE_MAX_LEAVES": text})


@pytest.mark.parametrize(
    "given", [{"attempts": -1}, {"attempts": "3"}, {"host_bytes": 1e9}, {"stall_seconds": float("nan")}]
)
def test_a_value_in_python_is_checked_as_well(given: dict[str, Any]) -> None:
    """Also where no variable is read, with the name of the setting."""
    with pytest.raises(InvalidOption, match=next(iter(given))):
        Settings(**given)
    with pytest.raises(InvalidOption, match=next(iter(given))):
        Settings.from_environment({}, **given)


@pytest.mark.parametrize("text", ["nan", "-0.5", "soon", "inf"])
def test_a_time_that_is_none_is_refused(text: str) -> None:
    """A time is a number of seconds; one without end would make a server that never stops."""
    with pytest.raises(InvalidOption, match="RESIDUAL_STORE_GRACEFUL_SECONDS"):
        Settings.from_environment({"RESIDUAL_STORE_GRACEFUL_SECONDS": text})


def test_the_memory_of_a_server_is_a_part_of_the_machine() -> None:
    """Without host_bytes it is half of what there is, and never more than there is."""
    assert 0 < Settings().host_budget < 1 << 50
    assert Settings(host_bytes=7).host_budget == 7
