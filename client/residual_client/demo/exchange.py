"""The exchange: one VJP object is stored for other processes, which are asked for its gradients."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from residual_client.client import Client
from residual_client.demo import elsewhere
from residual_client.demo.elsewhere import STAGE, Answer, Way
from residual_client.demo.model import Stage
from residual_client.demo.residuals import Kept
from residual_client.demo.text import Microbatch

__all__ = ["Parcel", "ask", "post"]

_SECONDS = 120.0


@dataclass(frozen=True, kw_only=True)
class Parcel:
    """A stored bundle, and the folder with what its backward needs and should give."""

    url: str
    key: str
    folder: Path


def post(
    client: Client,
    stages: Sequence[Stage],
    weights: Sequence[dict[str, Any]],
    microbatch: Microbatch,
    *,
    key: str,
    folder: Path,
) -> Parcel:
    """Run one microbatch, store the VJP object of one stage, and write its arrays and gradients into the folder."""
    vjps = _forwards(stages, weights, microbatch)
    client.offload(vjps[STAGE - 1], key).wait()
    last, own = Kept().fetch(vjps[-1], weights[-1]), weights[STAGE - 1]
    _, (cotangent, _) = stages[-1].backward(last, jnp.ones((), np.float32))
    weights_bar, x_bar = stages[STAGE - 1].backward(Kept().fetch(vjps[STAGE - 1], own), cotangent)
    np.savez(folder / "weights.npz", **own)
    np.savez(folder / "weights_bar.npz", **weights_bar)
    np.save(folder / "cotangent.npy", cotangent)
    np.save(folder / "x_bar.npy", x_bar)
    return Parcel(url=client.store.url, key=key, folder=folder)


def _forwards(
    stages: Sequence[Stage], weights: Sequence[dict[str, Any]], microbatch: Microbatch
) -> list[Any]:
    y, vjps = jnp.asarray(microbatch.tokens), []
    for stage, own in zip(stages, weights, strict=True):
        y, vjp = stage.forward(own, (y, jnp.asarray(microbatch.targets)) if stage is stages[-1] else y)
        vjps.append(vjp)
    return vjps


def ask(parcel: Parcel, way: Way) -> Answer:
    """Start a fresh Python process that computes the gradients of the bundle its way.

    A process that fails says why on standard error, and counts as one whose gradients differ.
    """
    command = [sys.executable, "-m", elsewhere.__name__, "--url", parcel.url, "--key", parcel.key]
    done = subprocess.run(  # noqa: S603 - all of it is ours
        [*command, "--folder", str(parcel.folder), way],
        # Two processes share a GPU only if neither takes all of its memory.
        env={**os.environ, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"},
        stdout=subprocess.PIPE,
        text=True,
        timeout=_SECONDS,
        check=False,
    )
    if done.returncode:
        return Answer(way=way, equal=False, arrays=0, model_imported=False, seconds=0.0)
    return Answer(**json.loads(done.stdout))
