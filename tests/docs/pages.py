"""The pages of the documentation as the tests see them: code blocks, sections, tables and links.

The language of a fenced block says what happens to it:

========================  ==============================================================================
``python``                runs, in one namespace for all such blocks of the page
``python`` with a name    a first line such as ``# forward.py``: saved under that name for a later block
``bash``                  runs with ``bash -euo pipefail``
``bash server``           runs until the end of the page; the next block waits until it listens
``output``                what the block before it prints, word for word
``text``                  is only shown
========================  ==============================================================================

All blocks of a page run in order in one directory, which is empty but for the Python files that stand beside the page.
The ports 8731 to 8739 stand for free ports.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

__all__ = ["PAGES", "ROOT", "Block", "anchors", "blocks", "links", "page", "sections", "table"]

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("docker/*.md")])

_BLOCK = re.compile(r"^```(?P<language>[^\n`]*)\n(?P<code>.*?)^```$", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"\]\((?P<target>[^)\s]+)\)|<img[^>]* src=\"(?P<source>[^\"]+)\"")
_FILE = re.compile(r"# (?P<name>[\w-]+\.py)\n")


@dataclass(frozen=True, kw_only=True)
class Block:
    """One fenced block: its language, its code, and the line of its first line of code."""

    path: Path
    language: str
    code: str
    line: int

    @property
    def place(self) -> str:
        return f"{self.path.relative_to(ROOT)}:{self.line}"

    @property
    def file_name(self) -> str | None:
        """The name that a Python block is to be saved under, if it has one."""
        named = _FILE.match(self.code) if self.language == "python" else None
        return named["name"] if named else None


def page(name: str) -> str:
    """The text of one page, by its path below the root of the repository."""
    return (ROOT / name).read_text()


def blocks(path: Path) -> Iterator[Block]:
    """The fenced blocks of a page in order."""
    text = path.read_text()
    for found in _BLOCK.finditer(text):
        line = text.count("\n", 0, found.start("code")) + 1
        yield Block(path=path, language=found["language"], code=found["code"], line=line)


def links(path: Path) -> Iterator[str]:
    """The targets of all links and images outside of code blocks."""
    for found in _LINK.finditer(_BLOCK.sub("", path.read_text())):
        yield found["target"] or found["source"]


def sections(text: str, level: int = 3) -> dict[str, str]:
    """The sections of a page under headings of one level: heading -> text up to the next heading of that level or above."""
    parts = re.split(rf"^(#{{1,{level}}}) (.+)$", text, flags=re.MULTILINE)
    return {
        heading: body
        for marks, heading, body in zip(parts[1::3], parts[2::3], parts[3::3], strict=True)
        if len(marks) == level
    }


def table(text: str) -> list[list[str]]:
    """The cells of all rows of all tables in a text, without the heads and the rules below them."""
    rows: list[list[str]] = []
    for line in text.splitlines():
        if not line.startswith("|"):
            continue
        cells = [cell.strip().replace(r"\|", "|") for cell in re.split(r"(?<!\\)\|", line.strip())[1:-1]]
        if all(re.fullmatch(r":?-+:?", cell) for cell in cells):
            rows.pop()
        else:
            rows.append(cells)
    return rows


def anchors(path: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    text = _BLOCK.sub("", path.read_text())
    return {
        re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")
        for heading in re.findall(r"^#+ (.+)$", text, flags=re.MULTILINE)
    }
