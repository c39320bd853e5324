"""A treemap: one rectangle for each part of a whole, its area in proportion, as an SVG picture.

The layout is that of Bruls, Huizing and van Wijk, "Squarified treemaps" (2000).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from html import escape
from typing import NamedTuple

__all__ = ["Box", "Part", "squarified", "svg"]

_LETTER_WIDTH, _LINE_HEIGHT = 6.6, 14.0
_THINNEST = 1e-9
"""What is left of a box never vanishes in rounding while there are parts for it."""


class Box(NamedTuple):
    """A rectangle: its upper left corner and its size."""

    x: float
    y: float
    width: float
    height: float


class Part(NamedTuple):
    """One part of a whole: its size, what is written on it, what it says when pointed at, and its colour."""

    size: float
    label: str
    title: str
    colour: str


def squarified(sizes: Sequence[float], box: Box) -> list[Box]:
    """One box for each of the positive ``sizes``, which descend; they fill ``box`` and are as square as can be.

    >>> [(box.x, box.width, box.height) for box in squarified([2, 1, 1], Box(0, 0, 4, 2))]
    [(0, 2.0, 2.0), (2.0, 2.0, 1.0), (2.0, 2.0, 1.0)]
    """
    scale = box.width * box.height / (sum(sizes) or 1)
    areas, boxes = [size * scale for size in sizes], list[Box]()
    while areas:
        side = min(box.width, box.height)
        count = 1
        while count < len(areas) and _worst(areas[: count + 1], side) <= _worst(areas[:count], side):
            count += 1
        row, box = _cut(areas[:count], box)
        boxes += row
        areas = areas[count:]
    return boxes


def _worst(areas: Sequence[float], side: float) -> float:
    """The greatest ratio of the sides of any box in a row along ``side``."""
    whole = sum(areas)
    return max(side**2 * areas[0] / whole**2, whole**2 / (side**2 * areas[-1]))


def _cut(areas: Sequence[float], box: Box) -> tuple[list[Box], Box]:
    """A row of boxes along the shorter side, and the box that is left."""
    depth = sum(areas) / min(box.width, box.height)
    row, start = [], 0.0
    for area in areas:
        length = area / depth
        if box.width >= box.height:
            row.append(Box(box.x, box.y + start, depth, length))
        else:
            row.append(Box(box.x + start, box.y, length, depth))
        start += length
    if box.width >= box.height:
        return row, Box(box.x + depth, box.y, max(box.width - depth, _THINNEST), box.height)
    return row, Box(box.x, box.y + depth, box.width, max(box.height - depth, _THINNEST))


def svg(parts: Iterable[Part], *, title: str, width: int = 900, height: int = 320) -> str:
    """The picture as one SVG element; parts of size 0 are left out."""
    shown = sorted((part for part in parts if part.size > 0), key=lambda part: -part.size)
    boxes = squarified([part.size for part in shown], Box(0, 0, width, height))
    inner = "".join(_rectangle(part, box) for part, box in zip(shown, boxes, strict=True))
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" role="img" aria-label="{escape(title)}" '
        f'viewBox="0 0 {width} {height}" width="100%" style="max-width:{width}px" '
        f'font-family="sans-serif" font-size="11">{inner}</svg>'
    )


def _rectangle(part: Part, box: Box) -> str:
    place = f'x="{box.x:.1f}" y="{box.y:.1f}" width="{box.width:.1f}" height="{box.height:.1f}"'
    lines = "".join(
        f'<text x="{box.x + 4:.1f}" y="{box.y + _LINE_HEIGHT * (line + 1):.1f}" fill="#111">{escape(text)}</text>'
        for line, text in enumerate(_fitting(part.label, box))
    )
    return (
        f"<g><title>{escape(part.title)}</title>"
        f'<rect {place} fill="{escape(part.colour)}" stroke="#fff"/>{lines}</g>'
    )


def _fitting(label: str, box: Box) -> Iterator[str]:
    """The lines of a label that fit into a box, each cut at its width."""
    letters = int((box.width - 8) / _LETTER_WIDTH)
    for text in label.split("\n")[: int((box.height - 4) / _LINE_HEIGHT)]:
        if letters >= 4:
            yield text if len(text) <= letters else text[: letters - 1] + "…"
