"""The demo: a small language model trained with its residuals offloaded, and every bit compared with plain training.

A character-level transformer of four pipeline stages learns from Python's own documentation.
Each step runs the forwards of all microbatches and then their backwards in reverse; each stage's VJP object is stored
after its forward and restored before its backward, the weights left out and given back with ``args``.
The same steps without offload, and two fresh processes that apply one stored backward, must give the same bits.

The file of ``--json`` holds one object. Sizes are in bytes, times in seconds and rates in bytes per second:

``passed``
    Whether all comparisons hold; the exit status is 0 if so, else 1.
``comparisons``
    Name -> whether it holds: ``losses``, ``first_gradients`` and ``final_weights`` are equal bit by bit;
    ``lower_peak``: the offloaded training had fewer live bytes; ``one_trace_per_stage``: each backward was traced once,
    both trainings together; ``source_free_backward`` and ``restored_with_like``: the gradient computed in another
    process has the same bits; ``model_not_imported``: the first of them never imported the model;
    ``no_bundle_left``: the store holds nothing of this run.
``steps``, ``microbatches``, ``stages``, ``parameters``, ``tokens_per_step``
    What was trained.
``store``, ``run``
    The URL of the store, and the first segment of all keys.
``plain``, ``offloaded``
    One training each: ``losses`` (one per step), ``peak_bytes`` (the largest sum of ``nbytes`` over all live device
    arrays, sampled at every stage boundary), ``seconds`` (all steps), ``step_seconds`` (the median step).
``traffic``
    ``bundles``, ``bytes_out`` and ``bytes_back`` (moved between client and store), ``bytes_saved`` (left out by
    constant, alias and bit encodings), ``seconds_out`` and ``seconds_back`` (spent in offload and restore),
    ``rate_out`` and ``rate_back``.
``traces``
    How often the backward of each stage was traced, both trainings together.
``elsewhere``
    The answers of the two other processes, ``source_free`` and ``like``: ``equal``, ``arrays`` (gradients compared),
    ``model_imported``, ``seconds`` (connect, fetch, compile and apply).
``bundles_left``
    How many bundles of this run the store still held at the end.
``seconds``
    The whole demo, from its start.
"""

from __future__ import annotations

from pathlib import Path

__all__ = ["run"]


def run(*, steps: int = 20, url: str | None = None, json_file: Path | None = None) -> int:
    """Run the demo and return its exit status: 0 if all comparisons hold, else 1.

    Without ``url`` it starts a server in a process of its own, with a temporary root.
    Raises `InvalidOption` for a store that another process cannot reach, and whatever the store raises.

    >>> run(steps=2)
    0
    """
    # Imported here, so that a process that applies a stored backward never sees the model.
    from rich.console import Console

    from residual_client.demo.report import show_figures
    from residual_client.demo.trial import hold_trial

    console = Console(highlight=False)
    figures = hold_trial(steps=steps, url=url, console=console)
    show_figures(console, figures)
    if json_file is not None:
        json_file.write_text(figures.to_json() + "\n", encoding="utf-8")
    return figures.exit_status
