"""The picture of docs/performance.md: the rates of one workload as dots on a logarithmic axis."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

__all__ = ["picture"]

type Json = Any

_WORKLOAD = "block"
_WIDTH, _LEFT, _RIGHT, _TOP, _ROW = 1040, 300, 850, 76, 26


@dataclass(frozen=True)
class _Axis:
    """A logarithmic axis from 10**first to 10**last GB/s."""

    first: int
    last: int

    @classmethod
    def over(cls, rates: Sequence[float]) -> _Axis:
        return cls(math.floor(math.log10(min(rates))), math.ceil(math.log10(max(rates))))

    def x(self, rate: float) -> float:
        share = (math.log10(rate) - self.first) / (self.last - self.first)
        return round(_LEFT + (_RIGHT - _LEFT) * share, 1)

    def lines(self, bottom: int) -> Iterator[str]:
        for rate in (10.0**decade for decade in range(self.first, self.last + 1)):
            x = self.x(rate)
            yield f'  <path class="grid" d="M{x} {_TOP}V{bottom}"/>'
            yield f'  <text class="small" x="{x}" y="{bottom + 18}" text-anchor="middle">{rate:g}</text>'


@dataclass(frozen=True)
class _Medium:
    """Ways through the same medium, and the limits of a put and a get through it."""

    title: str
    put: str
    get: str
    ours: Sequence[str]
    peers: Sequence[str]


_MEDIA = (
    _Medium(
        "memory of one host; limit: memcpy",
        "memcpy",
        "memcpy",
        ("segment", "embedded"),
        ("ray", "safetensors"),
    ),
    _Medium(
        "TCP on loopback; limit: a raw socket",
        "socket_send",
        "socket_receive",
        ("http",),
        ("flight", "redis"),
    ),
    _Medium(
        "disk; limit: one file, fsynced and uncached",
        "write_fsync",
        "read_uncached",
        ("durable",),
        ("orbax",),
    ),
)

_STYLE = """
    .page { fill: #ffffff; }
    text { fill: #1c2733; }
    .small { fill: #4a5866; font-size: 12px; }
    .grid { stroke: #d5dbe2; }
    .limit { stroke: #4c8a3c; stroke-width: 2; }
    .get-limit { stroke-dasharray: 4 3; }
    .ours { fill: #3b73b9; stroke: #3b73b9; }
    .peer { fill: #8a98a8; stroke: #8a98a8; }
    .hollow { fill: none; }
    circle { stroke-width: 2; }
    @media (prefers-color-scheme: dark) {
      .page { fill: #0f141a; }
      text { fill: #e6edf3; }
      .small { fill: #a9b5c1; }
      .grid { stroke: #2c3845; }
      .limit { stroke: #8ccb7b; }
      .ours { fill: #7fb0ee; stroke: #7fb0ee; }
      .peer { fill: #6c7a89; stroke: #6c7a89; }
    }
"""


def picture(figures: Json) -> str:
    """An SVG that stands alone, with colours for light and dark pages."""
    workload = figures["workloads"][_WORKLOAD]
    panels = [
        (medium, list(_ways(workload, medium))) for medium in _MEDIA if medium.put in workload["limits"]
    ]
    axis = _Axis.over(
        [one[f"{step}_gbps"] for _, ways in panels for *_, one in ways for step in ("put", "get")]
    )
    lines: list[str] = []
    bottom = _TOP
    for medium, ways in panels:
        lines += _panel(workload["limits"], medium, ways, axis, bottom)
        bottom += _ROW * (len(ways) + 1) + 14
    return "\n".join([*_head(workload, bottom + 34), *axis.lines(bottom), *lines, "</svg>", ""])


def _ways(workload: Json, medium: _Medium) -> Iterator[tuple[str, str, Json]]:
    """Name, class and figures of the ways through a medium that were measured."""
    for kind, names in (("transports", medium.ours), ("peers", medium.peers)):
        for name in names:
            if name in workload[kind]:
                yield name, "ours" if kind == "transports" else "peer", workload[kind][name]


def _head(workload: Json, height: int) -> list[str]:
    size = f"{workload['nbytes'] / 2**20:.0f} MiB in {workload['leaves']} leaves"
    look = 'role="img" aria-labelledby="title desc" font-family="system-ui, sans-serif" font-size="14"'
    return [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" {look}>',
        '  <title id="title">Puts and gets of the residuals of a transformer block</title>',
        f'  <desc id="desc">{_told(workload)}</desc>',
        f"  <style>{_STYLE}  </style>",
        f'  <rect class="page" width="{_WIDTH}" height="{height}" rx="8"/>',
        f'  <text x="20" y="30" font-weight="600">Residuals of a transformer block, {size}: GB/s, medians of one run</text>',
        *_key(),
    ]


def _told(workload: Json) -> str:
    """The picture in words."""
    rates = (
        f"{name} puts at {_short(one['put_gbps'])} and gets at {_short(one['get_gbps'])} GB/s"
        for kind in ("transports", "peers")
        for name, one in workload[kind].items()
    )
    return "; ".join(rates) + "."


def _key() -> list[str]:
    return [
        '  <circle class="ours" cx="26" cy="50" r="5"/><text class="small" x="38" y="54">put</text>',
        '  <circle class="ours hollow" cx="76" cy="50" r="8"/><text class="small" x="88" y="54">get</text>',
        '  <circle class="peer" cx="126" cy="50" r="5"/><text class="small" x="138" y="54">others</text>',
        '  <path class="limit" d="M192 42V58"/><text class="small" x="200" y="54">limit of a put</text>',
        '  <path class="limit get-limit" d="M292 42V58"/><text class="small" x="300" y="54">limit of a get</text>',
    ]


def _panel(
    limits: Json, medium: _Medium, ways: Sequence[tuple[str, str, Json]], axis: _Axis, top: int
) -> Iterator[str]:
    bottom = top + _ROW * (len(ways) + 1)
    yield f'  <text class="small" x="20" y="{top + 17}">{medium.title}</text>'
    for limit, kind in ((medium.put, "limit"), (medium.get, "limit get-limit")):
        yield f'  <path class="{kind}" d="M{axis.x(limits[limit]["gbps"])} {top + 24}V{bottom}"/>'
    for number, (name, kind, one) in enumerate(ways, 1):
        yield from _dots(name, kind, one, axis, top + _ROW * number + 14)


def _dots(name: str, kind: str, one: Json, axis: _Axis, y: int) -> Iterator[str]:
    put, get = one["put_gbps"], one["get_gbps"]
    weight = ' font-weight="600"' if kind == "ours" else ""
    yield f'  <text x="20" y="{y + 5}"{weight}>{name}</text>'
    yield f'  <circle class="{kind}" cx="{axis.x(put)}" cy="{y}" r="5"/>'
    yield f'  <circle class="{kind} hollow" cx="{axis.x(get)}" cy="{y}" r="8"/>'
    yield f'  <text class="small" x="{_RIGHT + 30}" y="{y + 4}">put {_short(put)}, get {_short(get)}</text>'


def _short(rate: float) -> str:
    return f"{rate:,.0f}" if rate >= 10 else f"{rate:.2f}"
