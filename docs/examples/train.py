"""Train the same small language model in three ways, compare them, and measure what they hold on the device.

    python train.py                                  # a store in memory of this process
    python train.py --url http://127.0.0.1:8731      # a server
    python train.py --json figures.json              # for docs/plots/live_bytes.py

The exit status is 0 if the ways agree and the store is empty at the end, else 1.
"""

from __future__ import annotations

import argparse
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import jax

import plain
import residual_client as rc
import scheduled
import wrapped
from figures import Figures
from memory import LiveBytes, temporary_bytes
from model import Size, batch, initial
from training import Step, train


def measure(client: rc.Client, size: Size, steps: int) -> Figures:
    """Train in all ways, one after the other."""
    live = {"layer by layer": LiveBytes(), "scheduled": LiveBytes()}
    compiled: dict[str, Any] = {"compiled": plain.compiled, "wrapped": wrapped.compiled(client)}
    ways: dict[str, Step] = {
        "compiled": compiled["compiled"],
        "layer by layer": partial(plain.layer_by_layer, watch=live["layer by layer"]),
        "scheduled": partial(scheduled.layer_by_layer, client, watch=live["scheduled"]),
        "wrapped": compiled["wrapped"],
    }
    trainings = {name: train(step, size, steps) for name, step in ways.items()}
    depths = sorted({max(1, size.layers * quarters // 4) for quarters in (1, 2, 3, 4)})
    return Figures(
        size=size,
        parameters=sum(array.size for array in jax.tree.leaves(trainings["compiled"].weights)),
        trainings=trainings,
        live={name: _last_two(one.samples, steps) for name, one in live.items()},
        depths=depths,
        temporaries={
            name: [_temporary_bytes(step, replace(size, layers=depth)) for depth in depths]
            for name, step in compiled.items()
        },
        bundles_left=len(client.store.list().entries),
    )


def _last_two(samples: list[int], steps: int) -> list[int]:
    return samples[-2 * (len(samples) // steps) :]


def _temporary_bytes(step: Any, size: Size) -> int:
    return temporary_bytes(step, jax.eval_shape(partial(initial, size)), batch(1, size))


def main() -> int:
    """Read the command line, run, and print."""
    parser = argparse.ArgumentParser(description="Train a small language model in three ways.")
    parser.add_argument("--steps", type=int, default=20)
    for name, default in asdict(Size()).items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--url", default="memory://")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    size = Size(**{name: getattr(given, name) for name in asdict(Size())})
    with rc.connect(given.url) as client:
        figures = measure(client, size, given.steps)
    print("\n".join(figures.lines()))
    if given.json is not None:
        given.json.write_text(figures.to_json())
    return 0 if figures.passed else 1


if __name__ == "__main__":
    raise SystemExit(main())
