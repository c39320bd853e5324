"""The report: one table for each workload."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from rich import box
from rich.console import Console
from rich.table import Column, Table

from residual_client.bench.figures import LIMIT_OF, WorkloadFigures
from residual_client.bench.stopwatch import Times
from residual_store.tables import in_units

__all__ = ["show_figures", "show_left_out"]

_COMPARED_WITH: Mapping[str, str] = {
    "flight": "http",
    "ray": "segment",
    "redis": "http",
    "safetensors": "segment",
    "orbax": "durable",
}
"""Peer -> the transport that a user would take instead."""


def show_left_out(console: Console, left_out: Mapping[str, str]) -> None:
    """Print one line for each thing that is not measured."""
    for name, why in left_out.items():
        console.print(f"left out: {name}, because {why}", soft_wrap=True, markup=False)


def show_figures(console: Console, figures: WorkloadFigures) -> None:
    """Print medians, spread and ratios of one workload, and what is missing."""
    console.print(_table(figures))
    show_left_out(console, figures.left_out)


def _table(figures: WorkloadFigures) -> Table:
    table = Table(
        "",
        *(Column(name, justify="right") for name in ("GB/s", "ms", "spread", "ratio")),
        Column("to"),
        title=f"{figures.name}: {figures.leaves} leaves, {in_units(figures.nbytes)}, {figures.rounds} rounds",
        title_justify="left",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
    )
    for row in _rows(figures):
        table.add_row(*row)
    return table


def _rows(figures: WorkloadFigures) -> Iterator[tuple[str, ...]]:
    for steps in figures.limits.values():
        for limit, times in steps.items():
            yield (limit, *_cells(figures, times), "", "")
    for name, steps in figures.transports.items():
        for step, times in steps.items():
            limit = LIMIT_OF[name][step]
            ratio = figures.gbps(times) / figures.limit_gbps(limit)
            yield (f"{name} {step}", *_cells(figures, times), f"{ratio:.2f}", limit)
    for name, steps in figures.client.items():
        store = figures.transports[name]["put"].median
        memcpy = figures.gbps(steps["get"]) / figures.limit_gbps("memcpy")
        for what, step in (("offload", "put"), ("offload until stored", "stored")):
            share = f"{store / steps[step].median:.2f}"
            yield (f"{what}, {name}", *_cells(figures, steps[step]), share, f"{name} put")
        yield (f"restore, {name}", *_cells(figures, steps["get"]), f"{memcpy:.2f}", "memcpy")
    for name, steps in figures.peers.items():
        for step, times in steps.items():
            yield (f"{name} {step}", *_cells(figures, times), *_beside_ours(figures, name, step))


def _beside_ours(figures: WorkloadFigures, peer: str, step: str) -> tuple[str, str]:
    """The rate of a peer as a share of ours, and which that is; empty if ours was not measured."""
    transport = _COMPARED_WITH[peer]
    if transport not in figures.transports:
        return "", ""
    ratio = figures.transports[transport][step].median / figures.peers[peer][step].median
    return f"{ratio:.2f}", f"{transport} {step}"


def _cells(figures: WorkloadFigures, times: Times) -> tuple[str, str, str]:
    return f"{figures.gbps(times):.3g}", f"{1e3 * times.median:.3g}", f"{100 * times.spread:.0f} %"
