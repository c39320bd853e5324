"""Links and pictures."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from tests.docs.pages import PAGES, ROOT, anchors, links


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_relative_link_leads_somewhere(path: Path) -> None:
    """A relative link names a file or folder of the repository, and its fragment a heading of that page."""
    for target in links(path):
        if "://" in target:
            continue
        name, _, fragment = target.partition("#")
        found = (path.parent / name).resolve() if name else path
        assert found.exists(), target
        assert found.is_relative_to(ROOT), target
        assert not fragment or fragment in anchors(found), target


@pytest.mark.parametrize("path", sorted(ROOT.glob("docs/**/*.md")), ids=lambda path: path.stem)
def test_every_page_can_be_reached(path: Path) -> None:
    """A page under docs/ is linked from another page."""
    others = [other for other in PAGES if other != path]
    targets = {
        (other.parent / target.partition("#")[0]).resolve()
        for other in others
        for target in links(other)
        if "://" not in target
    }
    assert path in targets


@pytest.mark.parametrize("path", sorted(ROOT.glob("docs/**/*.svg")), ids=lambda path: path.name)
def test_a_picture_stands_alone(path: Path) -> None:
    """An SVG is well-formed, has a title and a description, loads nothing, and has colours for a dark page."""
    text = path.read_text()
    root = ET.fromstring(text)
    names = [child.tag.rpartition("}")[2] for child in root]
    assert {"title", "desc"} <= set(names)
    assert "href" not in text
    assert "url(" not in text.replace("url(#", "")
    assert "prefers-color-scheme: dark" in text


def test_no_page_names_a_place_of_one_machine() -> None:
    """No page has a path of the machine that it was written on."""
    for path in PAGES:
        text = path.read_text()
        assert "/work/" not in text
        assert "/root/" not in text
