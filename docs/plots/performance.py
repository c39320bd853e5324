"""Fill docs/performance.md and draw docs/performance.svg from a file that `residual-store bench --json` wrote.

    make bench
    .venv/bin/python docs/plots/performance.py bench.json

It keeps the figures as docs/plots/performance.json; a test compares the page and the picture with them.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from plot import picture
from tables import Json, fill, table

__all__ = ["FIGURES", "PAGE", "PICTURE", "TABLES", "filled", "picture"]

DOCS = Path(__file__).parents[1]
FIGURES = Path(__file__).with_name("performance.json")
PAGE = DOCS / "performance.md"
PICTURE = DOCS / "performance.svg"


def filled(page: str, figures: Json) -> str:
    """The page with all tables between its marks made anew."""
    return fill(page, TABLES, figures)


def _machine(figures: Json) -> str:
    machine = figures["machine"]
    versions = ", ".join(f"{name} {version}" for name, version in machine["versions"].items())
    return (
        f"{machine['processor']}, {machine['cores']} cores, {machine['memory_bytes'] / 2**30:.0f} GiB of memory, "
        f"Linux {machine['kernel']}, {machine['file_system']}; Python {machine['python']}, {versions}."
    )


def _limits(figures: Json) -> str:
    workloads = figures["workloads"]
    names = workloads["block"]["limits"]
    rows = (
        [f"`{name}`", *(_rate(one["limits"][name]["gbps"]) for one in workloads.values())] for name in names
    )
    return table(["GB/s", *workloads], rows)


def _workload(name: str) -> Callable[[Json], str]:
    return lambda figures: _ways(figures["workloads"][name])


def _ways(workload: Json) -> str:
    size = f"{workload['leaves']:,} leaves" if workload["leaves"] > 1 else "One leaf"
    rows = _way_rows(workload)
    head = ["", "put", "of limit", "get", "of limit"]
    return f"{size}, {workload['nbytes']:,} bytes, {workload['rounds']} rounds.\n\n{table(head, rows)}"


def _way_rows(workload: Json) -> Iterator[Sequence[str]]:
    for name, one in workload["transports"].items():
        yield _row(f"**{name}**", one, "put", "get")
        if "get_warm_ms" in one:
            yield [f"**{name}**, cached", "", "", *_cells(one, "get_warm")]
    for name, one in workload["client"].items():
        yield _row(f"client, {name}", one, "put", "get")
        yield [f"client, {name}, until stored", *_cells(one, "stored"), "", ""]
    for name, one in workload["peers"].items():
        yield _row(name, one, "put", "get")


def _row(name: str, one: Json, *steps: str) -> list[str]:
    return [name, *(cell for step in steps for cell in _cells(one, step))]


def _cells(one: Json, step: str) -> tuple[str, str]:
    ratio = one.get(f"{step}_of_limit")
    return (
        f"{_rate(one[f'{step}_gbps'])} GB/s, {_rate(one[f'{step}_ms'])} ms",
        "" if ratio is None else _rate(ratio),
    )


def _rate(number: float) -> str:
    """Three digits, and no exponent.

    >>> _rate(12345.6), _rate(0.01234)
    ('12,346', '0.0123')
    """
    return f"{number:,.0f}" if number >= 100 else f"{number:#.3g}".rstrip(".")


def _goals(figures: Json) -> str:
    rows = ([what, f"{sign} {goal:g}", _reached(figures, ratio)] for what, sign, goal, ratio in _GOALS)
    return table(["", "goal", "here"], rows)


def _reached(figures: Json, ratio: Callable[[Json], float]) -> str:
    try:
        return _rate(ratio(figures["workloads"]))
    except KeyError as missing:
        return f"no {missing.args[0]}"


def _of(workload: str, transport: str, figure: str) -> Callable[[Json], float]:
    return lambda workloads: workloads[workload]["transports"][transport][figure]


def _to(workload: str, transport: str, peer: str, figure: str) -> Callable[[Json], float]:
    return lambda workloads: (
        workloads[workload]["transports"][transport][figure] / workloads[workload]["peers"][peer][figure]
    )


def _client(figure: str) -> Callable[[Json], float]:
    return lambda workloads: workloads["block"]["client"]["segment"][figure]


_GOALS: Sequence[tuple[str, str, float, Callable[[Json], float]]] = [
    *(
        (
            f"{workload}, {transport}, {step} to its limit",
            "≥",
            goal,
            _of(workload, transport, f"{step}_of_limit"),
        )
        for workload in ("block", "leaf")
        for transport, step, goal in [
            ("segment", "put", 0.75),
            ("segment", "get", 5.0),
            ("http", "put", 0.9),
            ("http", "get", 0.9),
            ("durable", "put", 0.8),
            ("durable", "get", 0.65),
            ("durable", "get_warm", 0.6),
        ]
    ),
    *(
        (f"{workload}, http, {step} in ms", "≤", goal, _of(workload, "http", f"{step}_ms"))
        for workload, goal in [("small", 10.0), ("tiny", 1.5)]
        for step in ("put", "get")
    ),
    *(
        (
            f"{workload}, {transport} {step} to {peer.title()}'s",
            "≥",
            goal,
            _to(workload, transport, peer, f"{step}_gbps"),
        )
        for workload in ("block", "leaf")
        for transport, peer, step, goal in [
            ("http", "flight", "put", 3.0),
            ("http", "flight", "get", 1.3),
            ("segment", "ray", "put", 1.0),
            ("segment", "ray", "get", 1.0),
        ]
    ),
    ("block, `client.offload` to the store's put, segment", "≥", 0.8, _client("offload_of_store")),
    (
        "block, `client.offload` until stored to the store's put, segment",
        "≥",
        0.8,
        _client("stored_of_store"),
    ),
    ("block, `client.offload` to memcpy, segment", "≥", 0.83, _client("offload_of_memcpy")),
    ("block, `client.restore` to memcpy, segment", "≥", 0.5, _client("restore_of_memcpy")),
]

TABLES: dict[str, Callable[[Json], str]] = {
    "machine": _machine,
    "limits": _limits,
    "goals": _goals,
    **{name: _workload(name) for name in ("block", "leaf", "small", "tiny")},
}


def main(source: Path) -> None:
    """Take over the figures in ``source``."""
    figures = json.loads(source.read_text())
    FIGURES.write_text(json.dumps(figures, indent=2) + "\n")
    PAGE.write_text(filled(PAGE.read_text(), figures))
    PICTURE.write_text(picture(figures))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
