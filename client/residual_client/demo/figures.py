"""The figures of the demo, what they must satisfy, and their JSON form."""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from residual_client.demo.bits import same_bits
from residual_client.demo.elsewhere import Answer
from residual_client.demo.training import Training

__all__ = ["Figures"]


@dataclass(frozen=True, kw_only=True, eq=False)
class Figures:
    """All that the demo measured; the package's docstring has the keys of the JSON form.

    ``traces`` has a count for each stage, and ``seconds`` is the time of the whole demo.
    """

    store: str
    run: str
    microbatches: int
    tokens_per_step: int
    parameters: int
    plain: Training
    offloaded: Training
    traces: tuple[int, ...]
    source_free: Answer
    like: Answer
    bundles_left: int
    seconds: float

    @property
    def comparisons(self) -> Mapping[str, bool]:
        """Name -> whether it holds."""
        plain, offloaded = self.plain, self.offloaded
        return {
            "losses": same_bits(plain.losses, offloaded.losses),
            "first_gradients": same_bits(plain.first_gradients, offloaded.first_gradients),
            "final_weights": same_bits(plain.weights, offloaded.weights),
            "lower_peak": offloaded.peak_bytes < plain.peak_bytes,
            "one_trace_per_stage": all(count == 1 for count in self.traces),
            "source_free_backward": self.source_free.equal,
            "model_not_imported": not self.source_free.model_imported,
            "restored_with_like": self.like.equal,
            "no_bundle_left": self.bundles_left == 0,
        }

    @property
    def exit_status(self) -> int:
        """0 if all comparisons hold, else 1."""
        return 0 if all(self.comparisons.values()) else 1

    def to_json(self) -> str:
        """The figures as JSON text; the package's docstring has the keys."""
        return json.dumps(
            {
                "passed": self.exit_status == 0,
                "comparisons": dict(self.comparisons),
                "steps": len(self.plain.losses),
                "stages": len(self.traces),
                **{name: getattr(self, name) for name in ("microbatches", "parameters", "tokens_per_step")},
                "store": self.store,
                "run": self.run,
                "plain": _training(self.plain),
                "offloaded": _training(self.offloaded),
                "traffic": self._traffic(),
                "traces": list(self.traces),
                "elsewhere": {one.way: asdict(one) for one in (self.source_free, self.like)},
                "bundles_left": self.bundles_left,
                "seconds": self.seconds,
            },
            indent=2,
        )

    def _traffic(self) -> dict[str, float]:
        traffic = self.offloaded.traffic
        return {**asdict(traffic), "rate_out": traffic.rate_out, "rate_back": traffic.rate_back}


def _training(training: Training) -> dict[str, Any]:
    return {
        "losses": [float(loss) for loss in training.losses.mean(axis=1)],
        "peak_bytes": training.peak_bytes,
        "seconds": sum(training.step_seconds),
        "step_seconds": statistics.median(training.step_seconds),
    }
