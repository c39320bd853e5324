"""The report of the demo: progress while it trains, and the tables at its end."""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Callable, Iterator

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn
from rich.table import Table

from residual_client.demo.figures import Figures
from residual_client.demo.training import Step, Training
from residual_store.tables import in_units

__all__ = ["progress", "show_figures"]


@contextlib.contextmanager
def progress(console: Console, *, title: str, steps: int) -> Iterator[Callable[[Step], None]]:
    """Where to report each step: a bar on a terminal, else a line for every step."""
    if not console.is_terminal:
        yield lambda step: console.print(f"{title} {step.number}/{steps}: {_text(step)}", soft_wrap=True)
        return
    columns = (TextColumn(f"{title:>9}"), BarColumn(16), TextColumn("{task.completed}/{task.total}"))
    with Progress(*columns, TextColumn("{task.description}"), console=console) as bars:
        task = bars.add_task("compiling", total=steps)
        yield lambda step: bars.update(task, advance=1, description=_text(step))


def _text(step: Step) -> str:
    moved, rate = step.traffic.bytes_out + step.traffic.bytes_back, step.traffic.rate
    text = f"loss {step.loss:.4f}"
    return f"{text}, {in_units(moved)} moved at {in_units(rate)}/s" if moved else text


def show_figures(console: Console, figures: Figures) -> None:
    """Print the tables, and the outcome."""
    console.print(
        f"\n{figures.parameters / 1e6:.2f} million parameters, {len(figures.traces)} stages, "
        f"{figures.microbatches} microbatches, {figures.tokens_per_step} characters a step"
    )
    console.print(_training_table(figures))
    console.print(_comparison_table(figures))
    failed = [name for name, holds in figures.comparisons.items() if not holds]
    outcome = f"[bold red]failed: {', '.join(failed)}[/]" if failed else "[bold green]all comparisons hold[/]"
    console.print(f"{outcome} ({figures.seconds:.0f} s)")


def _training_table(figures: Figures) -> Table:
    table = Table("", "plain", "offloaded")
    rows: dict[str, Callable[[Training], str]] = {
        "loss, first step": lambda one: f"{one.losses[0].mean():.6f}",
        "loss, last step": lambda one: f"{one.losses[-1].mean():.6f}",
        "peak of live arrays": lambda one: in_units(one.peak_bytes),
        "median step": lambda one: f"{statistics.median(one.step_seconds):.2f} s",
    }
    for name, cell in rows.items():
        table.add_row(name, cell(figures.plain), cell(figures.offloaded))
    for name, text in _of_offload(figures).items():
        table.add_row(name, "", text)
    return table


def _of_offload(figures: Figures) -> dict[str, str]:
    traffic = figures.offloaded.traffic
    return {
        "peak, plain to offloaded": f"{figures.plain.peak_bytes / figures.offloaded.peak_bytes:.1f} to 1",
        "traces of the backward, by stage": " ".join(map(str, figures.traces)),
        "bundles": str(traffic.bundles),
        "offload": f"{in_units(traffic.bytes_out)} at {in_units(traffic.rate_out)}/s",
        "restore": f"{in_units(traffic.bytes_back)} at {in_units(traffic.rate_back)}/s",
        "left out by encoding": in_units(traffic.bytes_saved),
    }


def _comparison_table(figures: Figures) -> Table:
    table = Table("comparison", "")
    for name, holds in figures.comparisons.items():
        table.add_row(_claim(name, figures), "[green]yes[/]" if holds else "[bold red]NO[/]")
    return table


def _claim(name: str, figures: Figures) -> str:
    return {
        "losses": "losses of all steps and microbatches equal bit by bit",
        "first_gradients": "gradients of the first step equal bit by bit",
        "final_weights": "weights after the last step equal bit by bit",
        "lower_peak": "peak of live arrays lower with offload",
        "one_trace_per_stage": "backward of each stage traced once, both trainings together",
        "source_free_backward": f"another process, stored program: {figures.source_free.arrays} gradients equal bit by bit",
        "model_not_imported": "that process never imported the model",
        "restored_with_like": f"another process, restored with like=: {figures.like.arrays} gradients equal bit by bit",
        "no_bundle_left": "no bundle of the run left in the store",
    }[name]
