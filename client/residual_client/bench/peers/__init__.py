"""Peers: what a user would pick instead, each with a warm connection and the fastest of its documented ways."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path

from residual_client.bench.peers.flight import flight
from residual_client.bench.peers.orbax_checkpoints import orbax_checkpoints
from residual_client.bench.peers.ray_objects import ray_objects
from residual_client.bench.peers.redis_values import redis_values
from residual_client.bench.peers.safetensors_files import safetensors_files
from residual_client.bench.way import Exchange

__all__ = ["PEERS", "open_peers"]

type Opener = Callable[[Path], AbstractContextManager[Exchange]]

PEERS: Mapping[str, Opener] = {
    "flight": flight,
    "ray": ray_objects,
    "redis": redis_values,
    "safetensors": safetensors_files,
    "orbax": orbax_checkpoints,
}
"""Name -> what opens it."""


def open_peers(stack: contextlib.ExitStack, folder: Path) -> tuple[list[Exchange], dict[str, str]]:
    """The peers that are installed, until the stack closes, and why the others are left out.

    What a peer writes to disk lies in ``folder``.
    """
    peers: list[Exchange] = []
    left_out: dict[str, str] = {}
    for name, opener in PEERS.items():
        try:
            peers.append(stack.enter_context(opener(folder)))
        except ModuleNotFoundError as error:
            left_out[name] = f"{error.name} is not installed"
        except (OSError, RuntimeError, ValueError) as error:
            left_out[name] = f"it did not start: {error}"
    return peers, left_out
