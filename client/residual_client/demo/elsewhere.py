"""The gradient elsewhere: a fresh process that applies the backward of one stored bundle.

It is started as ``python -m residual_client.demo.elsewhere --url URL --key KEY --folder FOLDER WAY`` and prints its
`Answer` as JSON.
With ``source_free`` it applies the stored program and never imports the model; with ``like`` it traces the model's
forward and restores the VJP object.
The folder holds ``weights.npz``, ``cotangent.npy``, and the gradients to expect: ``weights_bar.npz`` and ``x_bar.npy``.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import jax
import numpy as np

from residual_client.client import Client
from residual_client.connection import connect
from residual_client.demo.bits import same_bits

__all__ = ["STAGE", "Answer", "Way", "answer"]

STAGE = 3
"""The number of the stage whose bundle travels: one that reads neither characters nor targets."""

_MODEL = "residual_client.demo.model"

type Way = Literal["source_free", "like"]
type Gradients = tuple[dict[str, Any], Any]


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What such a process found: whether its ``arrays`` gradients have the expected bits, and whether it saw the model.

    ``seconds`` counts from the connection to the gradients.
    """

    way: Way
    equal: bool
    arrays: int
    model_imported: bool
    seconds: float


def answer(client: Client, key: str, folder: Path, way: Way) -> Answer:
    """Compute the gradients of the bundle ``key`` and compare them with those in the folder."""
    started = time.perf_counter()
    found = jax.block_until_ready((_source_free if way == "source_free" else _like)(client, key, folder))
    seconds = time.perf_counter() - started
    expected = (_named(folder / "weights_bar.npz"), np.load(folder / "x_bar.npy"))
    return Answer(
        way=way,
        equal=same_bits(found, expected),
        arrays=len(jax.tree.leaves(found)),
        model_imported=_MODEL in sys.modules,
        seconds=seconds,
    )


def _source_free(client: Client, key: str, folder: Path) -> Gradients:
    backward = client.backward(key)
    weights_bar, x_bar = backward(
        np.load(folder / "cotangent.npy"), args=(_named(folder / "weights.npz"), None)
    )
    assert _MODEL not in sys.modules, "a source-free backward must not need the model"
    return weights_bar, x_bar


def _like(client: Client, key: str, folder: Path) -> Gradients:
    from residual_client.demo.model import pipeline

    stage = pipeline()[STAGE - 1]
    weights, cotangent = _named(folder / "weights.npz"), np.load(folder / "cotangent.npy")
    # A block maps hidden states to hidden states, so the cotangent has the shape of x.
    x = jax.ShapeDtypeStruct(cotangent.shape, cotangent.dtype)
    vjp = client.restore(key, like=jax.eval_shape(stage.forward, weights, x)[1], args=(weights, None))
    gradients: Gradients = stage.backward(vjp, cotangent)
    return gradients


def _named(path: Path) -> dict[str, Any]:
    with np.load(path) as arrays:
        return dict(arrays)


def _main() -> None:
    parser = argparse.ArgumentParser(prog="residual_client.demo.elsewhere")
    for option in ("--url", "--key"):
        parser.add_argument(option, required=True)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("way", choices=("source_free", "like"))
    given = parser.parse_args()
    with connect(given.url) as client:
        print(json.dumps(asdict(answer(client, given.key, given.folder, given.way))))


if __name__ == "__main__":
    _main()
