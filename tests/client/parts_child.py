"""One of two processes with two devices each: ``python -m tests.client.parts_child PORT INDEX URL KEY [die]``.

It prints JSON: which of its checks hold, what a scratch offload and one to a key that is taken say, and how many bytes
its part had.
With ``die`` the second process ends before its offload, and the first one right after it.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

import residual_client as rc
from residual_store import Store, open_store
from residual_store.errors import ResidualStoreError, StoreFull

__all__ = ["backward", "forward", "shards_of"]


def _on(mesh: Mesh, host: Any, *spec: str | None) -> jax.Array:
    sharding = NamedSharding(mesh, PartitionSpec(*spec))
    return jax.make_array_from_callback(host.shape, sharding, lambda index: host[index])


def _dense(w: Any, x: Any, keys: Any) -> Any:
    noise = jax.checkpoint(lambda h: h * jax.vmap(lambda key: jax.random.normal(key, (4,)))(keys))
    return noise(jnp.tanh(x @ w))


_SUMMED = jax.jit(lambda w, x, keys: jax.vjp(_dense, w, x, keys))


def forward(devices: Any, *, mapped: bool = False, step: float = 1.0) -> tuple[jax.Array, Any]:
    """Output and VJP object of a layer on a mesh of these devices: a replicated weight, rows of samples, and keys.

    ``mapped``: by `jax.shard_map`, with a scalar on each device among the residuals.
    """
    mesh = Mesh(np.array(devices), ("i",), axis_types=(AxisType.Auto,))
    w = _on(mesh, np.linspace(-1, 1, 16, dtype=np.float32).reshape(4, 4))
    x = _on(mesh, np.arange(32, dtype=np.float32).reshape(8, 4) / 9 * np.float32(step), "i")
    if mapped:
        rows = PartitionSpec("i")
        summed = jax.shard_map(
            lambda a: jnp.sin(a) * jax.lax.psum(a.sum(), "i"), mesh=mesh, in_specs=rows, out_specs=rows
        )
        return jax.jit(lambda x: jax.vjp(summed, x))(x)
    data = np.arange(16, dtype=np.uint32).reshape(8, 2)
    return _SUMMED(w, x, jax.random.wrap_key_data(_on(mesh, data, "i")))


backward = jax.jit(lambda f_vjp, y: [g for g in f_vjp(y) if g.dtype != jax.dtypes.float0])


def shards_of(arrays: Any) -> list[dict[str, str]]:
    """For each array the bytes of the shards that are in this process, by their index in the whole."""
    found = []
    for array in jax.tree.leaves(arrays):
        data = jax.random.key_data(array) if jnp.issubdtype(array.dtype, jax.dtypes.prng_key) else array
        starts = [(tuple(s.start or 0 for s in one.index), one.data) for one in data.addressable_shards]
        found.append({str(start): np.asarray(shard).tobytes().hex() for start, shard in starts})
    return found


def _said(call: Callable[[], object]) -> str:
    try:
        call()
    except ResidualStoreError as error:
        return f"{error.code}: {error}"
    return "nothing was refused"


def _report(client: rc.Client, key: str, *, mapped: bool) -> dict[str, Any]:
    y, f_vjp = forward(jax.devices(), mapped=mapped)
    wanted = shards_of(backward(f_vjp, y))
    handle = client.offload(f_vjp, key)
    restored = client.restore(handle)
    again = client.restore(client.offload(forward(jax.devices(), mapped=mapped)[1], key, if_exists="replace"))
    refused = client.offload(forward(jax.devices(), mapped=mapped)[1], key)
    leaves, back = jax.tree.leaves(f_vjp), jax.tree.leaves(restored)
    return {
        "scratch": _said(lambda: client.offload(f_vjp)),
        "flush": _said(client.flush),
        "restore": _said(lambda: client.restore(refused)),
        "same bits": shards_of(restored) == shards_of(again) == shards_of(f_vjp),
        "same shardings": [one.sharding for one in leaves] == [one.sharding for one in back],
        "same gradients": shards_of(backward(restored, y)) == wanted,
        "received": handle.wait().nbytes,
    }


class _Refusing:
    """A store that refuses the first put."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._refused = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def put(self, *args: Any, **options: Any) -> Any:
        if not self._refused:
            self._refused = True
            raise StoreFull("the first put is refused")
        return self._store.put(*args, **options)


def _repeated(url: str, key: str, *, refused: bool) -> dict[str, Any]:
    """Two steps under one key, of which one process makes the first twice, because it was ``refused``."""
    store: Any = _Refusing(open_store(url)) if refused else open_store(url)
    report: dict[str, Any] = {}
    with rc.Client(store) as client:
        steps = [forward(jax.devices(), step=step)[1] for step in (1.0, 2.0)]
        if refused:
            lost = client.offload(steps[0], key, if_exists="replace")
            report["refusal"] = _said(lost.wait)
            report["another"] = _said(lambda: client.offload(steps[1], key, if_exists="replace"))
        for name, step in zip(("first", "second"), steps, strict=True):
            restored = client.restore(client.offload(step, key, if_exists="replace"))
            report[name] = shards_of(restored) == shards_of(step)
    return report


def main() -> None:
    port, index, url, key, *rest = sys.argv[1:]
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(f"127.0.0.1:{port}", 2, int(index))
    with rc.connect(url) as client:
        if rest:
            _, f_vjp = forward(jax.devices())
            if index == "0":
                client.offload(f_vjp, key).wait()
            # The end of a process as the kernel makes it: no handler runs.
            os._exit(9)
        report = {
            "layer": _report(client, key, mapped=False),
            "mapped": _report(client, f"{key}-m", mapped=True),
        }
    report["repeated"] = _repeated(url, f"{key}-r", refused=index == "0")
    print(json.dumps(report), flush=True)


if __name__ == "__main__":
    main()
