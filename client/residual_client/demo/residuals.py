"""Where the residuals wait for their backward: on the device, or in a store."""

from __future__ import annotations

import operator
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import jax

from residual_client.client import Client
from residual_client.demo.model import Weights
from residual_client.handle import Handle
from residual_client.jax_compat import NotSaveable, TreeDef, is_sentinel

__all__ = ["Kept", "Offloaded", "Residuals", "Traffic"]


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """What went to the store and came back: bundles, bytes and seconds.

    ``bytes_saved`` did not travel, because an encoding left them out.

    >>> (Traffic(bundles=3) - Traffic(bundles=1)).bundles
    2
    """

    bundles: int = 0
    bytes_out: int = 0
    bytes_back: int = 0
    bytes_saved: int = 0
    seconds_out: float = 0.0
    seconds_back: float = 0.0

    def __add__(self, other: Traffic) -> Traffic:
        return _combined(operator.add, self, other)

    def __sub__(self, other: Traffic) -> Traffic:
        return _combined(operator.sub, self, other)

    @property
    def rate_out(self) -> float:
        """Bytes per second of the offloads, as the training saw them; 0.0 if there were none."""
        return self.bytes_out / self.seconds_out if self.seconds_out else 0.0

    @property
    def rate_back(self) -> float:
        """Bytes per second of the restores, as the training saw them; 0.0 if there were none."""
        return self.bytes_back / self.seconds_back if self.seconds_back else 0.0

    @property
    def rate(self) -> float:
        """Bytes per second, both ways together."""
        seconds = self.seconds_out + self.seconds_back
        return (self.bytes_out + self.bytes_back) / seconds if seconds else 0.0


def _combined(how: Callable[[Any, Any], Any], one: Traffic, other: Traffic) -> Traffic:
    return Traffic(**{name: how(value, getattr(other, name)) for name, value in vars(one).items()})


class Residuals(Protocol):
    """The seam of the schedule: what becomes of a VJP object between its forward and its backward."""

    @property
    def traffic(self) -> Traffic:
        """What was moved so far."""

    def hold(self, vjp: Any, name: str) -> Any:
        """Take a VJP object after its forward; what comes back stands for it."""

    def fetch(self, held: Any, weights: Weights) -> Any:
        """The VJP object again, for its backward; ``weights`` are those of its stage."""

    def drop(self, held: Any) -> None:
        """Forget it, after its backward."""


class Kept:
    """Residuals stay on the device, as in plain training."""

    @property
    def traffic(self) -> Traffic:
        return Traffic()

    def hold(self, vjp: Any, name: str) -> Any:
        return vjp

    def fetch(self, held: Any, weights: Weights) -> Any:
        # Only what is missing: an array for what the backward does not read would be another treedef, and another trace.
        # By position: jax 0.11 holds the leaves of a dict in tuples.
        tree: TreeDef
        saved, tree = jax.tree.flatten(held.args_res[0], is_leaf=is_sentinel)
        own = jax.tree.leaves(weights)
        held.args_res[0] = tree.unflatten(
            [new if isinstance(old, NotSaveable) else old for old, new in zip(saved, own, strict=True)]
        )
        return held

    def drop(self, held: Any) -> None:
        pass


class Offloaded:
    """Residuals go to a store, each VJP object as a bundle below ``run``."""

    def __init__(self, client: Client, run: str) -> None:
        self.traffic = Traffic()
        self._client = client
        self._run = run

    def hold(self, vjp: Any, name: str) -> Handle:
        # JAX computes behind the call, and that time is not the store's.
        jax.block_until_ready(vjp)
        started = time.perf_counter()
        handle = self._client.offload(vjp, f"{self._run}/{name}", durability="host")
        self.traffic += Traffic(bundles=1, seconds_out=time.perf_counter() - started)
        return handle

    def fetch(self, held: Handle, weights: Weights) -> Any:
        started = time.perf_counter()
        vjp = jax.block_until_ready(self._client.restore(held, args=(weights, None)))
        seconds, receipt = time.perf_counter() - started, held.wait()
        self.traffic += Traffic(
            bytes_out=receipt.nbytes,
            bytes_back=receipt.nbytes,
            bytes_saved=receipt.array_nbytes - receipt.nbytes,
            seconds_back=seconds,
        )
        return vjp

    def drop(self, held: Handle) -> None:
        self._client.delete(held)
