"""The figures of a run: what was compared and measured, as lines for a person and as JSON."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator
from dataclasses import asdict, dataclass

from model import Size
from training import Comparison, Training

__all__ = ["Figures"]

_TOLERANCE = 1e-6
_PAIRS = (("scheduled", "layer by layer"), ("wrapped", "compiled"), ("layer by layer", "compiled"))


@dataclass(frozen=True, kw_only=True, eq=False)
class Figures:
    """What a run has seen; sizes are in bytes and times in seconds.

    ``live`` has the samples of the last two steps, for the two ways that go layer by layer.
    ``temporaries`` has one size for each number of layers in ``depths``, for the two compiled steps.
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
        """Each pair of ways that should give the same, and the two plain ones."""
        return {
            f"{one}, {other}": Comparison.of(self.trainings[one], self.trainings[other])
            for one, other in _PAIRS
        }

    @property
    def passed(self) -> bool:
        """The schedule has the same bits, the wrapped step differs by 1e-6 at most, and the store is empty."""
        scheduled, wrapped, _ = self.comparisons.values()
        close = max(wrapped.losses, wrapped.gradients) <= _TOLERANCE
        return scheduled.same_bits and close and not self.bundles_left

    def lines(self) -> Iterator[str]:
        """Losses per step, comparisons and sizes."""
        yield "step  " + "  ".join(f"{name:>14}" for name in self.trainings)
        for number, losses in enumerate(zip(*self._losses().values(), strict=True), 1):
            yield f"{number:4}  " + "  ".join(f"{loss:14.6f}" for loss in losses)
        for name, one in self.comparisons.items():
            bits = "the same bits" if one.same_bits else "not the same bits"
            yield f"{name}: {bits}; losses differ by {one.losses:.1e}, gradients by {one.gradients:.1e}"
        for name, samples in self.live.items():
            yield f"most live bytes, {name}: {max(samples) / 2**20:.1f} MiB"
        for name, sizes in self.temporaries.items():
            yield f"temporaries, {name}: {sizes[-1] / 2**20:.1f} MiB"
        yield f"bundles left: {self.bundles_left}"

    def to_json(self) -> str:
        """All but gradients and weights; ``step_seconds`` are medians."""
        figures = {
            "size": asdict(self.size),
            "parameters": self.parameters,
            "losses": self._losses(),
            "step_seconds": {name: statistics.median(one.seconds) for name, one in self.trainings.items()},
            "comparisons": {name: asdict(one) for name, one in self.comparisons.items()},
            "live": self.live,
            "depths": self.depths,
            "temporaries": self.temporaries,
            "bundles_left": self.bundles_left,
            "passed": self.passed,
        }
        return json.dumps(figures, indent=2) + "\n"

    def _losses(self) -> dict[str, list[float]]:
        return {name: one.losses for name, one in self.trainings.items()}
