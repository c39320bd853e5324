"""A training: the same steps from the same start, whatever becomes of the residuals."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
import numpy.typing as npt

from residual_client.demo.adam import initial_moments, updated
from residual_client.demo.model import LENGTH, Stage, initial_weights
from residual_client.demo.residuals import Residuals, Traffic
from residual_client.demo.schedule import LiveBytes, Schedule
from residual_client.demo.text import Corpus, Microbatch

__all__ = ["MICROBATCHES", "SEQUENCES", "Step", "Training", "microbatches_of", "on_host", "train"]

MICROBATCHES = 4
SEQUENCES = 6


@dataclass(frozen=True, kw_only=True)
class Step:
    """One step as it is shown: its mean loss, its duration in seconds, and what it moved."""

    number: int
    loss: float
    seconds: float
    traffic: Traffic


@dataclass(frozen=True, kw_only=True, eq=False)
class Training:
    """What a training leaves behind, all in host memory.

    ``losses`` is [step, microbatch].
    ``first_gradients`` are those of the first step and ``weights`` the final ones, each by stage.
    """

    losses: npt.NDArray[np.float32]
    first_gradients: list[dict[str, Any]]
    weights: list[dict[str, Any]]
    peak_bytes: int
    step_seconds: tuple[float, ...]
    traffic: Traffic


def train(
    stages: Sequence[Stage],
    corpus: Corpus,
    residuals: Residuals,
    *,
    steps: int,
    report: Callable[[Step], None],
) -> Training:
    """Train from the initial weights for that many steps."""
    course = _Course(stages, corpus, residuals)
    for number in range(1, steps + 1):
        report(course.step(number))
    return course.training()


class _Course:
    """A training under way: weights and moments on the device, and what is noted of each step."""

    def __init__(self, stages: Sequence[Stage], corpus: Corpus, residuals: Residuals) -> None:
        self._corpus = corpus
        self._residuals = residuals
        self._live = LiveBytes()
        self._schedule = Schedule(stages, residuals, self._live)
        self._weights: Any = initial_weights(len(corpus.characters))
        self._moments = initial_moments(self._weights)
        self._first_gradients: Any = None
        self._losses: list[npt.NDArray[np.float32]] = []
        self._seconds: list[float] = []

    def step(self, number: int) -> Step:
        """Run one step; the first is 1."""
        started, before = time.perf_counter(), self._residuals.traffic
        microbatches = microbatches_of(self._corpus, number)
        losses, gradients = self._schedule.gradients(self._weights, microbatches, f"step-{number}")
        self._weights, self._moments = updated(self._weights, gradients, self._moments, number)
        if self._first_gradients is None:
            self._first_gradients = on_host(gradients)
        self._losses.append(np.array(losses, np.float32))
        jax.block_until_ready(self._weights)
        self._seconds.append(time.perf_counter() - started)
        return Step(
            number=number,
            loss=float(self._losses[-1].mean()),
            seconds=self._seconds[-1],
            traffic=self._residuals.traffic - before,
        )

    def training(self) -> Training:
        return Training(
            losses=np.stack(self._losses),
            first_gradients=self._first_gradients,
            weights=on_host(self._weights),
            peak_bytes=self._live.peak,
            step_seconds=tuple(self._seconds),
            traffic=self._residuals.traffic,
        )


def microbatches_of(corpus: Corpus, step: int) -> list[Microbatch]:
    """The microbatches of a step, the same in every training."""
    return corpus.microbatches(step, count=MICROBATCHES, sequences=SEQUENCES, length=LENGTH)


def on_host(tree: Any) -> Any:
    """A copy in host memory; a view would keep the device arrays alive."""
    return jax.tree.map(np.array, tree)
