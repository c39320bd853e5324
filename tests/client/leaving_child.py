"""A process that ends, or forks, with an upload on its way: ``python -m ... URL named|scratch|forked|last``."""

from __future__ import annotations

import atexit
import os
import sys
import warnings

import jax
import jax.numpy as jnp

import residual_client as rc
from residual_store.errors import RequestRefused
from tests.client.bits import bits_of


def main() -> None:
    url, way = sys.argv[1:]
    client = rc.connect(url)
    y, vjp = jax.jit(lambda x: jax.vjp(jnp.sin, x))(jnp.arange(1 << 20, dtype=jnp.float32))
    handle = client.offload(vjp, None if way == "scratch" else "leaving/a")
    print(handle.state, flush=True)
    if way == "forked":
        _fork(client, handle, y)
    if way == "last":
        # By then Python has ended its pools of threads.
        handle.wait()
        _, large = jax.jit(lambda x: jax.vjp(jnp.sin, x))(jnp.arange(5 << 20, dtype=jnp.float32))
        atexit.register(lambda: print(client.offload(large, "leaving/b").wait().key))


def _fork(client: rc.Client, handle: rc.Handle, y: jax.Array) -> None:
    # JAX itself says that a fork may hang; what is shown is that this client does not.
    warnings.simplefilter("ignore")
    sys.stdout.flush()
    child = os.fork()
    if not child:
        for call in (
            lambda: client.restore(handle),
            handle.wait,
            client.flush,
            lambda: client.delete(handle),
        ):
            try:
                call()
            except RequestRefused as refusal:
                print(type(refusal).__name__, "belongs to process" in str(refusal), flush=True)
        client.close()
        sys.exit(0)
    os.waitpid(child, 0)
    print(
        bits_of(client.restore(handle)(y))
        == bits_of(jax.vjp(jnp.sin, jnp.arange(y.size, dtype=y.dtype))[1](y))
    )


if __name__ == "__main__":
    main()
