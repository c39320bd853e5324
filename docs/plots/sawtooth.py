"""The picture of docs/examples: live bytes over forward and backward, and temporaries over the number of layers."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

__all__ = ["picture"]

type Json = Any

_WIDTH, _HEIGHT, _TOP, _BOTTOM = 1040, 400, 96, 340
_MIB = 2**20
_TICKS = 4

_STYLE = """
    .page { fill: #ffffff; }
    text { fill: #1c2733; }
    .small { fill: #4a5866; font-size: 12px; }
    .grid { stroke: #d5dbe2; }
    .turn { stroke: #8a98a8; stroke-dasharray: 3 4; }
    .line { fill: none; stroke-width: 2; stroke-linejoin: round; }
    .kept { stroke: #8a98a8; }
    .stored { stroke: #3b73b9; }
    .kept-dot { fill: #8a98a8; }
    .stored-dot { fill: #3b73b9; }
    @media (prefers-color-scheme: dark) {
      .page { fill: #0f141a; }
      text { fill: #e6edf3; }
      .small { fill: #a9b5c1; }
      .grid { stroke: #2c3845; }
      .turn { stroke: #6c7a89; }
      .kept { stroke: #6c7a89; }
      .stored { stroke: #7fb0ee; }
      .kept-dot { fill: #6c7a89; }
      .stored-dot { fill: #7fb0ee; }
    }
"""


@dataclass(frozen=True)
class _Line:
    """One way: its name, its class, and its points as x and MiB."""

    name: str
    kind: str
    points: Sequence[tuple[float, float]]


@dataclass(frozen=True)
class _Panel:
    """Axes from 0 to ``x_last`` and from 0 to ``y_last`` MiB, drawn between two positions."""

    left: int
    right: int
    x_last: float
    y_last: float

    @classmethod
    def around(cls, left: int, right: int, lines: Sequence[_Line]) -> _Panel:
        points = [point for line in lines for point in line.points]
        most = max(size for _, size in points)
        step = 10 ** math.floor(math.log10(most / _TICKS))
        tick = next(step * times for times in (1, 2, 5, 10) if step * times * _TICKS >= most)
        return cls(left, right, max(x for x, _ in points), tick * _TICKS)

    def x(self, value: float) -> float:
        return round(self.left + (self.right - self.left) * value / self.x_last, 1)

    def y(self, size: float) -> float:
        return round(_BOTTOM - (_BOTTOM - _TOP) * size / self.y_last, 1)

    def grid(self) -> Iterator[str]:
        for tick in range(_TICKS + 1):
            size = self.y_last * tick / _TICKS
            yield f'  <path class="grid" d="M{self.left} {self.y(size)}H{self.right}"/>'
            yield _small(self.left - 8, self.y(size) + 4, f"{size:g}", "end")

    def drawn(self, line: _Line) -> str:
        path = "L".join(f"{self.x(x)} {self.y(size)}" for x, size in line.points)
        return f'  <path class="line {line.kind}" d="M{path}"/>'

    def dots(self, line: _Line) -> Iterator[str]:
        for x, size in line.points:
            yield f'  <circle class="{line.kind}-dot" cx="{self.x(x)}" cy="{self.y(size)}" r="4"/>'


def picture(figures: Json) -> str:
    """An SVG that stands alone, with colours for light and dark pages."""
    live = [
        _Line(name, kind, [(moment, size / _MIB) for moment, size in enumerate(figures["live"][name])])
        for name, kind in (("layer by layer", "kept"), ("scheduled", "stored"))
    ]
    temporaries = [
        _Line(name, kind, [(x, size / _MIB) for x, size in _pairs(figures, name)])
        for name, kind in (("compiled", "kept"), ("wrapped", "stored"))
    ]
    parts = [*_head([*live, *temporaries]), *_steps(live), *_depths(temporaries)]
    return "\n".join([*parts, "</svg>", ""])


def _pairs(figures: Json, name: str) -> list[tuple[int, int]]:
    return list(zip(figures["depths"], figures["temporaries"][name], strict=True))


def _head(lines: Sequence[_Line]) -> list[str]:
    look = 'role="img" aria-labelledby="title desc" font-family="system-ui, sans-serif" font-size="14"'
    told = "; ".join(f"{line.name}: {_most(line)} MiB at most" for line in lines)
    return [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" {look}>',
        '  <title id="title">What a small language model holds on the device, plain and offloaded</title>',
        f'  <desc id="desc">{told}.</desc>',
        f"  <style>{_STYLE}  </style>",
        f'  <rect class="page" width="{_WIDTH}" height="{_HEIGHT}" rx="8"/>',
    ]


def _most(line: _Line) -> str:
    return f"{max(size for _, size in line.points):.1f}"


def _steps(lines: Sequence[_Line]) -> Iterator[str]:
    """Live bytes of two steps, each a forward and a backward of as many samples."""
    panel = _Panel.around(60, 640, lines)
    yield f'  <text x="{panel.left}" y="30" font-weight="600">Live arrays during two steps, MiB</text>'
    yield from panel.grid()
    quarter = (panel.x_last + 1) / 4
    for number, name in enumerate(("forward", "backward", "forward", "backward")):
        if number:
            x = panel.x(number * quarter - 0.5)
            yield f'  <path class="turn" d="M{x} {_TOP}V{_BOTTOM}"/>'
        yield _small(panel.x((number + 0.5) * quarter - 0.5), _BOTTOM + 22, name)
    yield from map(panel.drawn, lines)
    yield from _key(panel.left, lines)


def _depths(lines: Sequence[_Line]) -> Iterator[str]:
    """Temporaries of a compiled step for some numbers of layers."""
    panel = _Panel.around(740, 1010, lines)
    yield f'  <text x="{panel.left}" y="30" font-weight="600">Temporaries of one step, MiB</text>'
    yield from panel.grid()
    for x, _ in lines[0].points:
        yield _small(panel.x(x), _BOTTOM + 22, f"{x:g}")
    yield _small((panel.left + panel.right) / 2, _BOTTOM + 42, "layers")
    for line in lines:
        yield panel.drawn(line)
        yield from panel.dots(line)
    yield from _key(panel.left, lines)


def _key(left: int, lines: Sequence[_Line]) -> Iterator[str]:
    for row, line in enumerate(lines):
        y = 50 + 20 * row
        yield f'  <path class="line {line.kind}" d="M{left} {y}h20"/>'
        yield _small(left + 28, y + 4, f"{line.name}: {_most(line)} at most", "start")


def _small(x: float, y: float, text: str, anchor: str = "middle") -> str:
    return f'  <text class="small" x="{x:g}" y="{y:g}" text-anchor="{anchor}">{text}</text>'
