"""The page and the picture of performance show what was measured."""

from __future__ import annotations

import importlib
import json
from types import ModuleType

import pytest

from tests.docs.pages import ROOT


@pytest.fixture
def source(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """What makes page and picture."""
    monkeypatch.syspath_prepend(ROOT / "docs" / "plots")
    return importlib.import_module("performance")


def test_the_tables_are_those_of_the_kept_figures(source: ModuleType) -> None:
    """Nobody has changed a figure by hand, and the page has all tables."""
    page = source.PAGE.read_text()
    assert source.filled(page, json.loads(source.FIGURES.read_text())) == page
    assert page.count("<!-- figures: ") == page.count("<!-- end -->") == len(source.TABLES)


def test_the_picture_is_that_of_the_kept_figures(source: ModuleType) -> None:
    """The dots stand where the figures say, and the description has them in words."""
    figures = json.loads(source.FIGURES.read_text())
    assert source.picture(figures) == source.PICTURE.read_text()


def test_the_kept_figures_are_of_a_whole_run(source: ModuleType) -> None:
    """They come from a run with peers that was not a quick one."""
    figures = json.loads(source.FIGURES.read_text())
    assert not figures["quick"]
    assert figures["workloads"]["block"]["peers"]


def test_another_figure_gives_another_page(source: ModuleType) -> None:
    """The comparison can fail: one changed rate changes its table and the picture."""
    figures = json.loads(source.FIGURES.read_text())
    figures["workloads"]["block"]["transports"]["http"]["put_gbps"] *= 2
    assert source.filled(source.PAGE.read_text(), figures) != source.PAGE.read_text()
    assert source.picture(figures) != source.PICTURE.read_text()
