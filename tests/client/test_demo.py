"""The demo: the real command, and what it takes for it to fail."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from residual_client import demo
from residual_client.demo.bits import same_bits
from residual_client.demo.elsewhere import Answer
from residual_client.demo.figures import Figures
from residual_client.demo.report import show_figures
from residual_client.demo.residuals import Traffic
from residual_client.demo.text import Corpus
from residual_client.demo.training import Training
from residual_client.demo.trial import hold_trial
from residual_store import open_store
from residual_store.errors import InvalidOption, Unreachable
from tests.servers import Server


def run_demo(*options: str, json_file: Path) -> tuple[subprocess.CompletedProcess[str], dict[str, Any]]:
    command = [sys.executable, "-m", "residual_store.cli", "demo", *options, "--json", str(json_file)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=150, check=False)
    return done, json.loads(json_file.read_text()) if json_file.exists() else {}


def training(**changed: Any) -> Training:
    """A training of one step and two stages, with arrays of its own."""
    values: dict[str, Any] = {
        "losses": np.array([[4.5, 4.25]], np.float32),
        "first_gradients": [{"w": np.array([1.0, 0.0], np.float32)}, {"w": np.ones(3, np.float32)}],
        "weights": [{"w": np.full(2, 0.5, np.float32)}, {"w": np.zeros(3, np.float32)}],
        "peak_bytes": 100,
        "step_seconds": (0.5,),
        "traffic": Traffic(),
    }
    return Training(**values | changed)


def sound_figures() -> Figures:
    return Figures(
        store="http://127.0.0.1:1",
        run="demo-0",
        microbatches=2,
        tokens_per_step=8,
        parameters=5,
        plain=training(),
        offloaded=training(peak_bytes=40, traffic=Traffic(bundles=4, bytes_out=7, seconds_out=0.5)),
        traces=(1, 1),
        source_free=Answer(way="source_free", equal=True, arrays=2, model_imported=False, seconds=0.1),
        like=Answer(way="like", equal=True, arrays=2, model_imported=True, seconds=0.1),
        bundles_left=0,
        seconds=1.0,
    )


def with_training(**changed: Any) -> Callable[[Figures], Figures]:
    return lambda figures: dataclasses.replace(figures, offloaded=training(**{"peak_bytes": 40} | changed))


def with_answer(name: str, **changed: Any) -> Callable[[Figures], Figures]:
    return lambda figures: dataclasses.replace(
        figures, **{name: dataclasses.replace(getattr(figures, name), **changed)}
    )


def with_figures(**changed: Any) -> Callable[[Figures], Figures]:
    return lambda figures: dataclasses.replace(figures, **changed)


NEXT_LOSS = np.nextafter(np.array([[4.5, 4.25]], np.float32), np.float32(9))

DOCTORED = {
    "losses": with_training(losses=NEXT_LOSS),
    "first_gradients": with_training(
        first_gradients=[{"w": np.array([1.0, -0.0], np.float32)}, {"w": np.ones(3, np.float32)}]
    ),
    "final_weights": with_training(weights=[{"w": np.full(2, 0.5, np.float32)}]),
    "lower_peak": with_training(peak_bytes=100),
    "one_trace_per_stage": with_figures(traces=(1, 2)),
    "source_free_backward": with_answer("source_free", equal=False),
    "model_not_imported": with_answer("source_free", model_imported=True),
    "restored_with_like": with_answer("like", equal=False),
    "no_bundle_left": with_figures(bundles_left=1),
}


class TestCommand:
    """`residual-store demo` as a user runs it."""

    def test_with_a_server_of_its_own(self, tmp_path: Path) -> None:
        """It ends with 0, all comparisons hold, and the offloaded training needs less than half of the memory."""
        done, figures = run_demo("--steps", "2", json_file=tmp_path / "figures.json")
        assert done.returncode == 0, done.stdout + done.stderr
        assert figures["passed"]
        assert set(figures["comparisons"]) == set(DOCTORED)
        assert all(figures["comparisons"].values())
        assert figures["traces"] == [1, 1, 1, 1]
        assert figures["traffic"]["bundles"] == 2 * 4 * 4
        assert figures["offloaded"]["peak_bytes"] * 2 < figures["plain"]["peak_bytes"]
        assert 1e6 < figures["parameters"] < 3e6
        # The process with the model shows that the check for it works.
        assert figures["elsewhere"]["like"]["model_imported"]
        assert "offloaded 2/2: loss" in done.stdout
        assert "all comparisons hold" in done.stdout

    def test_with_a_server_that_runs_already(self, disk_server: Server, tmp_path: Path) -> None:
        """It uses the store at --url and leaves no bundle in it."""
        done, figures = run_demo(
            "--steps", "1", "--url", disk_server.url, json_file=tmp_path / "figures.json"
        )
        assert done.returncode == 0, done.stdout + done.stderr
        assert figures["store"] == disk_server.url
        with open_store(disk_server.url) as store:
            assert store.list(prefix=f"{figures['run']}/").entries == ()
            assert figures["run"] not in {usage.run for usage in store.usage().runs}

    def test_with_a_server_that_is_not_there(self, tmp_path: Path) -> None:
        """It says so in one line, before it trains."""
        done, figures = run_demo("--url", "http://127.0.0.1:1", json_file=tmp_path / "figures.json")
        assert done.returncode == 1
        assert done.stderr.startswith(f"{Unreachable.code}:")
        assert (done.stdout, figures) == ("", {})


class TestOutcome:
    """What the figures must satisfy."""

    def test_sound_figures_pass(self) -> None:
        """Equal bits, a lower peak and one trace for each stage are all it takes."""
        figures = sound_figures()
        assert figures.exit_status == 0
        assert all(figures.comparisons.values())
        assert figures.comparisons.keys() == DOCTORED.keys()

    @pytest.mark.parametrize("name", DOCTORED)
    def test_any_failing_comparison_fails_the_demo(self, name: str) -> None:
        """One doctored figure fails its own comparison, and with it the demo."""
        figures = DOCTORED[name](sound_figures())
        assert [key for key, holds in figures.comparisons.items() if not holds] == [name]
        assert figures.exit_status == 1
        written = json.loads(figures.to_json())
        assert (written["passed"], written["comparisons"][name]) == (False, False)

    @pytest.mark.parametrize("name", DOCTORED)
    def test_the_report_names_what_failed(self, name: str) -> None:
        """The last line names the comparison, and its row says no."""
        console = Console(width=120)
        with console.capture() as capture:
            show_figures(console, DOCTORED[name](sound_figures()))
        assert f"failed: {name} " in capture.get()
        assert capture.get().count(" NO ") == 1

    def test_the_status_of_run_is_that_of_the_figures(
        self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        """The entry point returns 1 and still writes the figures."""
        doctored = DOCTORED["losses"](sound_figures())
        monkeypatch.setattr("residual_client.demo.trial.hold_trial", lambda **_: doctored)
        assert demo.run(steps=1, json_file=tmp_path / "figures.json") == 1
        assert not json.loads((tmp_path / "figures.json").read_text())["passed"]

    def test_a_store_in_memory_is_refused(self) -> None:
        """No other process could reach it."""
        with pytest.raises(InvalidOption, match="another process cannot reach memory://"):
            hold_trial(steps=1, url="memory://", console=Console())


class TestBits:
    """Equality bit by bit."""

    @pytest.mark.parametrize(
        "other",
        [
            {"w": np.array([-0.0, np.nan], np.float32)},
            {"w": np.array([0.0, np.nan], np.float64)},
            {"w": np.array([[0.0, np.nan]], np.float32)},
            {"v": np.array([0.0, np.nan], np.float32)},
            {"w": np.array([0.0, np.nan], np.float32), "x": np.zeros(1)},
            {},
        ],
    )
    def test_tells_apart(self, other: Any) -> None:
        """Signs of zero, dtypes, shapes, names and counts all matter."""
        assert not same_bits({"w": np.array([0.0, np.nan], np.float32)}, other)

    def test_a_nan_equals_itself(self) -> None:
        """Bits are compared, not numbers."""
        assert same_bits([np.array([np.nan, 1.0])], [np.array([np.nan, 1.0])])


class TestText:
    """The corpus and its microbatches."""

    def test_microbatches_are_the_same_each_time(self) -> None:
        """Two trainings see the same characters; each target is the character that follows."""
        corpus = Corpus.of_topics()
        one, other = (corpus.microbatches(3, count=2, sequences=3, length=8) for _ in range(2))
        assert len(one) == 2
        for mine, theirs in zip(one, other, strict=True):
            assert same_bits((mine.tokens, mine.targets), (theirs.tokens, theirs.targets))
            assert mine.tokens.shape == (3, 8)
            assert np.array_equal(mine.tokens[:, 1:], mine.targets[:, :-1])

    def test_steps_differ(self) -> None:
        """Each step has characters of its own."""
        corpus = Corpus.of_topics()
        one, other = (corpus.microbatches(step, count=1, sequences=1, length=64)[0] for step in (1, 2))
        assert not np.array_equal(one.tokens, other.tokens)
