"""A process that offloads one microbatch of a model which captures its weights; prints how many bytes that sent."""

from __future__ import annotations

import sys

import jax

import residual_client as rc
from tests.client.captured import forward_of, microbatch

if __name__ == "__main__":
    url, key, number = sys.argv[1:]
    with rc.connect(url) as client:
        y, f_vjp = jax.jit(forward_of("captured"))(microbatch(int(number)))
        print(client.offload(f_vjp, key).wait().nbytes)
