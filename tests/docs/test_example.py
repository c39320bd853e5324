"""The example of docs/examples: three ways of training agree, and its page shows what was seen."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from tests.docs.pages import ROOT

_SMALL = "--steps 3 --layers 4 --width 32 --sequences 2 --length 64"


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The figures of a small run of the example, as a user would start it."""
    file = tmp_path_factory.mktemp("example") / "figures.json"
    done = subprocess.run(
        [sys.executable, ROOT / "docs/examples/train.py", *_SMALL.split(), "--json", file],
        capture_output=True,
        text=True,
        timeout=150,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(file.read_text())


@pytest.fixture
def source(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """What makes page and picture."""
    monkeypatch.syspath_prepend(ROOT / "docs" / "plots")
    return importlib.import_module("live_bytes")


def test_the_three_ways_agree(small: Any) -> None:
    """The schedule has the bits of the same steps without a store, the wrapped step those numbers to 1e-6, and all learn."""
    assert small["comparisons"]["scheduled, layer by layer"]["same_bits"]
    wrapped = small["comparisons"]["wrapped, compiled"]
    assert max(wrapped["losses"], wrapped["gradients"]) <= 1e-6
    for losses in small["losses"].values():
        assert len(losses) == 3
        assert losses[-1] < losses[0]
    assert small["bundles_left"] == 0


def test_what_waits_in_the_store_is_not_on_the_device(small: Any) -> None:
    """Live arrays and temporaries have a lower peak, and temporaries hardly grow with the number of layers."""
    live, temporaries = small["live"], small["temporaries"]
    assert len(live["scheduled"]) == len(live["layer by layer"]) == 2 * 4 * 4
    assert max(live["scheduled"]) < 0.7 * max(live["layer by layer"])
    assert temporaries["wrapped"][-1] < 0.5 * temporaries["compiled"][-1]
    assert temporaries["wrapped"][-1] < 1.2 * temporaries["wrapped"][0]


def test_one_other_bit_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison can fail: a weight whose sign bit alone differs is not the same."""
    monkeypatch.syspath_prepend(ROOT / "docs" / "examples")
    training = importlib.import_module("training")
    one, other = (
        training.Training(losses=[1.0], gradients=[np.ones(2)], weights=[np.array([zero])])
        for zero in (0.0, -0.0)
    )
    assert training.Comparison.of(one, one).same_bits
    assert not training.Comparison.of(one, other).same_bits
    other.gradients = [np.array([1.0, 1.5])]
    assert training.Comparison.of(other, one).gradients == 0.5


def test_page_and_picture_are_those_of_the_kept_figures(source: ModuleType) -> None:
    """Nobody has changed a figure by hand, and the page has all tables."""
    figures = json.loads(source.FIGURES.read_text())
    page = source.PAGE.read_text()
    assert source.filled(page, figures) == page
    assert page.count("<!-- figures: ") == page.count("<!-- end -->") == len(source.TABLES)
    assert source.picture(figures) == source.PICTURE.read_text()


def test_the_kept_figures_are_those_of_a_run_that_passed(source: ModuleType) -> None:
    """They come from 20 steps of the model in its full size, as the page says."""
    figures = json.loads(source.FIGURES.read_text())
    assert figures["passed"]
    assert figures["size"]["layers"] == 8
    assert all(len(losses) == 20 for losses in figures["losses"].values())


def test_another_figure_gives_another_page_and_picture(source: ModuleType) -> None:
    """The comparison can fail: one changed sample changes its table and the picture."""
    figures = json.loads(source.FIGURES.read_text())
    figures["live"]["scheduled"][0] *= 2
    assert source.filled(source.PAGE.read_text(), figures) != source.PAGE.read_text()
    assert source.picture(figures) != source.PICTURE.read_text()
