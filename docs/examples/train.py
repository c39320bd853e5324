"""Train the same small language model in three ways, compare them, and measure what they hold on the device.

    python train.py                                  # a store in memory of this process
    python train.py --url http://127.0.0.1:8731      # a server
    python train.py --json figures.json              # for docs/plots/live_bytes.py

Exit status: 0 if way 2 has the bits of plain JAX layer by layer, way 3 the losses and gradients of the compiled step
to 1e-6, and the store holds nothing at the end; else 1.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import plain
import residual_client as rc
import scheduled
import wrapped
from memory import LiveBytes, temporary_bytes
from model import Size, Weights, batch, initial, updated

type Step = Callable[[Weights, jax.Array], tuple[jax.Array, Weights]]

_TOLERANCE = 1e-6


@dataclass(kw_only=True, eq=False)
class Training:
    """What one way of training leaves behind, in host memory."""

    losses: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    gradients: Any = None
    weights: Any = None


def train(step: Step, size: Size, steps: int) -> Training:
    """Train from the initial weights; the gradients that are kept are those of the first step."""
    training, weights = Training(), initial(size)
    moments = jax.tree.map(jnp.zeros_like, (weights, weights))
    for number in range(1, steps + 1):
        started = time.perf_counter()
        value, gradients = step(weights, batch(number, size))
        if training.gradients is None:
            training.gradients = on_host(gradients)
        weights, moments = updated(weights, gradients, moments, number)
        training.losses.append(float(value))
        training.seconds.append(time.perf_counter() - started)
        del gradients
    training.weights = on_host(weights)
    return training


def on_host(tree: Any) -> Any:
    """A copy; a view would keep the device arrays alive."""
    return jax.tree.map(np.array, tree)


@dataclass(frozen=True, kw_only=True, eq=False)
class Comparison:
    """How two trainings differ: in the bits of all losses, gradients and weights, and by how much at most.

    ``losses`` is the largest relative difference of a loss, ``gradients`` the largest difference within a gradient of the
    first step relative to the largest element there.
    """

    same_bits: bool
    losses: float
    gradients: float

    @classmethod
    def of(cls, one: Training, other: Training) -> Comparison:
        pairs = list(zip(jax.tree.leaves(one.gradients), jax.tree.leaves(other.gradients), strict=True))
        weights = zip(jax.tree.leaves(one.weights), jax.tree.leaves(other.weights), strict=True)
        return cls(
            same_bits=one.losses == other.losses
            and all(a.tobytes() == b.tobytes() for a, b in [*pairs, *weights]),
            losses=max(abs(a - b) / abs(b) for a, b in zip(one.losses, other.losses, strict=True)),
            gradients=max(float(np.abs(a - b).max() / np.abs(b).max()) for a, b in pairs),
        )


@dataclass(frozen=True, kw_only=True, eq=False)
class Figures:
    """All that was seen; sizes in bytes, times in seconds.

    ``live`` has the samples of the last two steps, and ``temporaries`` one figure for each number of layers in ``depths``.
    """

    size: Size
    parameters: int
    trainings: dict[str, Training]
    live: dict[str, list[int]]
    depths: list[int]
    temporaries: dict[str, list[int]]
    bundles_left: int

    @property
    def comparisons(self) -> dict[str, Comparison]:
        pairs = [("way 2", "layer by layer"), ("way 3", "compiled"), ("layer by layer", "compiled")]
        return {
            f"{one}, {other}": Comparison.of(self.trainings[one], self.trainings[other])
            for one, other in pairs
        }

    @property
    def passed(self) -> bool:
        way_2, way_3, _ = self.comparisons.values()
        return way_2.same_bits and max(way_3.losses, way_3.gradients) <= _TOLERANCE and not self.bundles_left

    def to_json(self) -> str:
        """Without gradients and weights."""
        figures = {
            "size": asdict(self.size),
            "parameters": self.parameters,
            "losses": {name: one.losses for name, one in self.trainings.items()},
            "step_seconds": {name: statistics.median(one.seconds) for name, one in self.trainings.items()},
            "comparisons": {name: asdict(one) for name, one in self.comparisons.items()},
            "live": self.live,
            "depths": self.depths,
            "temporaries": self.temporaries,
            "bundles_left": self.bundles_left,
            "passed": self.passed,
        }
        return json.dumps(figures, indent=2) + "\n"


def measure(client: rc.Client, size: Size, steps: int) -> Figures:
    """Train in all ways."""
    kept, stored = LiveBytes(), LiveBytes()
    ways: dict[str, Step] = {
        "compiled": plain.compiled,
        "layer by layer": partial(plain.layer_by_layer, watch=kept),
        "way 2": partial(scheduled.layer_by_layer, client, watch=stored),
        "way 3": wrapped.compiled(client),
    }
    trainings = {name: train(step, size, steps) for name, step in ways.items()}
    last = -2 * len(kept.samples) // steps if steps > 1 else 0
    depths = sorted({max(1, size.layers * quarter // 4) for quarter in (1, 2, 3, 4)})
    return Figures(
        size=size,
        parameters=sum(array.size for array in jax.tree.leaves(trainings["compiled"].weights)),
        trainings=trainings,
        live={"layer by layer": kept.samples[last:], "way 2": stored.samples[last:]},
        depths=depths,
        temporaries={
            name: [_temporary_bytes(step, replace(size, layers=depth)) for depth in depths]
            for name, step in ways.items()
            if name in ("compiled", "way 3")
        },
        bundles_left=len(client.store.list().entries),
    )


def _temporary_bytes(step: Any, size: Size) -> int:
    return temporary_bytes(step, jax.eval_shape(lambda: initial(size)), batch(1, size))


def report(figures: Figures) -> Iterator[str]:
    """Lines for a person."""
    yield "step  " + "  ".join(f"{name:>14}" for name in figures.trainings)
    for number, losses in enumerate(zip(*(one.losses for one in figures.trainings.values()), strict=True), 1):
        yield f"{number:4}  " + "  ".join(f"{loss:14.6f}" for loss in losses)
    for name, one in figures.comparisons.items():
        bits = "the same bits" if one.same_bits else "other bits"
        yield f"{name}: {bits}; losses differ by {one.losses:.1e}, gradients by {one.gradients:.1e}"
    for name, samples in figures.live.items():
        yield f"most live bytes, {name}: {max(samples) / 2**20:.1f} MiB"
    for name, sizes in figures.temporaries.items():
        yield f"temporaries, {name}: {sizes[-1] / 2**20:.1f} MiB"
    yield f"bundles left: {figures.bundles_left}"


def main() -> int:
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
    print("\n".join(report(figures)))
    if given.json is not None:
        given.json.write_text(figures.to_json())
    return 0 if figures.passed else 1


if __name__ == "__main__":
    raise SystemExit(main())
