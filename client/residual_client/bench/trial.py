"""The trial: every workload through every way, and the tables of what they show."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import replace

from rich.console import Console

from residual_client.bench.contest import Contest, contest
from residual_client.bench.figures import Figures, WorkloadFigures
from residual_client.bench.machine import machine
from residual_client.bench.measurement import Measured, Pace, measure
from residual_client.bench.report import show_figures, show_left_out
from residual_client.bench.way import Exchange, Way
from residual_client.bench.workload import NAMES, Workload, workload

__all__ = ["hold_trial"]

_PACES = {
    "block": Pace(warm_up=2, rounds=10, seconds=25.0, turn=3),
    "leaf": Pace(warm_up=1, rounds=8, seconds=35.0, turn=2),
    "small": Pace(warm_up=1, rounds=12, seconds=15.0, turn=5),
    "tiny": Pace(warm_up=1, rounds=30, seconds=10.0, turn=10),
}
_QUICK = Pace(warm_up=1, rounds=3, seconds=1.0, fewest=2)


def hold_trial(*, peers: bool, quick: bool, url: str | None, console: Console) -> Figures:
    """Measure all workloads, one after the other, and print a table for each."""
    started = time.perf_counter()
    workloads = [workload(name, quick=quick) for name in NAMES]
    with contest(nbytes=max(one.nbytes for one in workloads), peers=peers, url=url) as contestants:
        show_left_out(console, contestants.left_out)
        measured = []
        for one in workloads:
            measured.append(_figures(one, contestants, _pace(one.name, peers=peers, quick=quick)))
            show_figures(console, measured[-1])
        return Figures(
            workloads=measured,
            left_out=contestants.left_out,
            machine=machine(contestants.folder),
            quick=quick,
            seconds=time.perf_counter() - started,
        )


def _pace(name: str, *, peers: bool, quick: bool) -> Pace:
    if quick:
        return _QUICK
    return replace(_PACES[name], seconds=_PACES[name].seconds * (2 if peers else 1))


def _figures(one: Workload, contestants: Contest, pace: Pace) -> WorkloadFigures:
    transports = _direct(one, contestants.transports, try_first=True)
    client = _direct(one, contestants.client, try_first=True) if one.vjp is not None else []
    ways = [*contestants.limits, *transports, *client, *contestants.peers]
    times = dict(zip(ways, measure(one, ways, pace), strict=True))

    def of(members: Iterable[Way]) -> Measured:
        return {way.name: times[way] for way in members}

    return WorkloadFigures(
        name=one.name,
        nbytes=one.nbytes,
        leaves=len(one.arrays),
        limits=of(contestants.limits),
        transports=of(_direct(one, transports)),
        client=of(_direct(one, client)),
        peers=of(contestants.peers),
        left_out={
            way.name: way.detours[one.name] for way in contestants.transports if one.name in way.detours
        },
    )


def _direct(one: Workload, ways: Sequence[Exchange], *, try_first: bool = False) -> list[Exchange]:
    """Those that have moved this workload as their name says, and no other way; ``try_first`` with one put."""
    for way in ways if try_first else ():
        way.put(one)
        way.drop(one)
    return [way for way in ways if one.name not in way.detours]
