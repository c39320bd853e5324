"""What an offload and a restore cost on the accelerator at hand, against plain copies to and from pinned memory.

``python -m tests.bench.accelerator [--json FILE] [--quick]`` takes the residuals of one transformer block (``block``,
about 128 MiB of bfloat16; with ``--quick`` about 7 MiB) through an embedded store, on two ways: ``pinned`` and ``plain``,
which is what a client does without pinned memory.
The limits are taken in the same rounds, of the same leaves: ``to_pinned`` and ``from_pinned`` copy them between device
and pinned memory, ``memcpy`` copies them once on the host.
An offload is a copy to the host and one into the store, so its limit is ``to_pinned`` and ``memcpy`` one after the other.
A restore is a copy to pinned memory and one to the device, so its limit is ``memcpy`` and ``from_pinned``.
On the CPU backend device memory is host memory: there ``plain`` is what a client does, and neither limit says much.

All take turns; figures are medians, with the distance of the quartiles as a share of it (``spread``).
The JSON has ``platform``, ``device``, ``nbytes``, ``leaves``, ``rounds``, ``taken`` (the way that a client takes by itself),
``plainly`` (why -> how many leaves do not go through pinned memory), ``limits`` (limit -> ``ms``, ``gbps``, ``spread``)
and ``ways`` (way -> ``offload`` and ``restore`` -> the same and ``of_limit``).
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import tree_leaves, tree_map

from residual_client.bench.block import block_vjp
from residual_client.bench.stopwatch import Stopwatch, Times
from residual_client.client import Client
from residual_client.staging import Staging
from residual_store import Settings, open_store

__all__ = ["main"]

_LIMITS = {"offload": ("to_pinned", "memcpy"), "restore": ("memcpy", "from_pinned")}
_WINDOW = Settings().staging_bytes


@dataclass(frozen=True, kw_only=True)
class Course:
    """One VJP object, the clients that take it through a store, and warm memory for plain copies."""

    vjp: Any
    clients: Mapping[str, Client]
    warm: list[np.ndarray]

    @classmethod
    def of(cls, vjp: Any) -> Course:
        stagings = {"pinned": Staging(window_bytes=_WINDOW, on_cpu=True), "plain": Staging(window_bytes=0)}
        return cls(
            vjp=vjp,
            clients={name: Client(open_store("memory://"), staging=way) for name, way in stagings.items()},
            warm=[np.ones(leaf.nbytes, np.uint8) for leaf in tree_leaves(vjp)],
        )

    def steps(self) -> list[Callable[[Stopwatch], None]]:
        """What takes turns."""
        return [self._pinned_copies, self._memcpy, *map(self._through, self.clients)]

    def _fresh(self) -> Any:
        """The VJP object in new arrays, because JAX keeps what it has copied to the host once."""
        return jax.block_until_ready(tree_map(jnp.copy, self.vjp))

    def _pinned_copies(self, watch: Stopwatch) -> None:
        leaves = tree_leaves(self._fresh())
        places = [leaf.sharding for leaf in leaves]
        with watch.step("to_pinned"):
            pinned = jax.device_put(leaves, [place.with_memory_kind("pinned_host") for place in places])
            jax.block_until_ready(pinned)
        with watch.step("from_pinned"):
            jax.block_until_ready(jax.device_put(pinned, places))

    def _memcpy(self, watch: Stopwatch) -> None:
        hosts = [np.asarray(leaf).reshape(-1).view(np.uint8) for leaf in tree_leaves(self._fresh())]
        with watch.step("memcpy"):
            for target, host in zip(self.warm, hosts, strict=True):
                np.copyto(target, host)

    def _through(self, name: str) -> Callable[[Stopwatch], None]:
        client = self.clients[name]

        def step(watch: Stopwatch) -> None:
            vjp = self._fresh()
            with watch.step(f"offload {name}"):
                handle = client.offload(vjp)
                handle.wait()
            with watch.step(f"restore {name}"):
                restored = jax.block_until_ready(client.restore(handle))
            assert all(map(_same, tree_leaves(restored), tree_leaves(vjp)))
            client.delete(handle)

        return step


def _same(one: jax.Array, other: jax.Array) -> bool:
    return np.asarray(one).tobytes() == np.asarray(other).tobytes()


def measured(vjp: Any, *, warm_up: int, rounds: int) -> dict[str, Any]:
    """The figures, as in the JSON."""
    course, watch = Course.of(vjp), Stopwatch()
    for number in range(warm_up + rounds):
        if number == warm_up:
            watch.reset()
        for step in course.steps():
            step(watch)
    leaves, device = tree_leaves(vjp), jax.devices()[0]
    nbytes = sum(leaf.nbytes for leaf in leaves)
    why = Counter(_refusals(leaves))
    return {
        "platform": device.platform,
        "device": device.device_kind,
        "nbytes": nbytes,
        "leaves": len(leaves),
        "rounds": rounds,
        "taken": "plain" if why.total() == len(leaves) else "pinned",
        "plainly": dict(why),
        **_figures(watch.times, nbytes),
    }


def _refusals(leaves: list[jax.Array]) -> list[str]:
    staging = Staging(window_bytes=_WINDOW)
    asked = [staging.refusal(leaf.dtype, leaf.sharding, leaf.nbytes) for leaf in leaves]
    return [reason for reason in asked if reason is not None]


def _figures(times: Mapping[str, Times], nbytes: int) -> dict[str, Any]:
    limits = {name: _figure(times[name], nbytes) for name in ("to_pinned", "from_pinned", "memcpy")}
    ways: dict[str, Any] = {}
    for name in ("pinned", "plain"):
        ways[name] = {}
        for step, parts in _LIMITS.items():
            figure = _figure(times[f"{step} {name}"], nbytes)
            limit = sum(limits[part]["ms"] for part in parts)
            ways[name][step] = {**figure, "of_limit": limit / figure["ms"]}
    return {"limits": limits, "ways": ways}


def _figure(times: Times, nbytes: int) -> dict[str, float]:
    return {"ms": 1e3 * times.median, "gbps": nbytes / times.median / 1e9, "spread": times.spread}


def _print(figures: Mapping[str, Any]) -> None:
    print(
        f"{figures['leaves']} leaves, {figures['nbytes'] / 2**20:.1f} MiB, on {figures['device']} ({figures['platform']})"
    )
    if figures["platform"] == "cpu":
        print("This is the CPU backend and no accelerator: its device memory is host memory.")
    print(f"A client takes the {figures['taken']} way here.")
    for reason, count in figures["plainly"].items():
        print(f"  {count} leaves go the plain way: {reason}")
    for name, figure in figures["limits"].items():
        print(f"{name:16} {figure['ms']:9.2f} ms {figure['gbps']:7.2f} GB/s")
    for way, steps in figures["ways"].items():
        for step, figure in steps.items():
            print(
                f"{step} {way:8} {figure['ms']:9.2f} ms {figure['gbps']:7.2f} GB/s, {figure['of_limit']:.2f} of "
                + " and ".join(_LIMITS[step])
            )


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.accelerator", description=__doc__)
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args(arguments)
    vjp = block_vjp(batch=1, length=128) if options.quick else block_vjp(batch=4, length=512)
    figures = measured(vjp, warm_up=1 if options.quick else 3, rounds=3 if options.quick else 15)
    _print(figures)
    if options.json is not None:
        options.json.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
