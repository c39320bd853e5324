"""A process that runs a stored program with one damaged byte after another, since a fault in a reader would end it.

It prints a line for each position: ``refused``, ``right``, or what happened instead.
"""

from __future__ import annotations

import jax
import numpy as np

import residual_client as rc
from residual_store.errors import ResidualStoreError
from tests.cases.arguments import layer
from tests.cases.case import matrix, ramp
from tests.client.bits import bits_of


def main() -> None:
    vjp = jax.vjp(layer, matrix(), ramp())[1]
    wanted = bits_of(jax.jit(lambda f_vjp, ct: f_vjp(ct))(vjp, ramp()))
    with rc.connect("memory://") as client:
        handle = client.offload(vjp, "run/step")
        client.flush()
        fingerprint = str(handle.fingerprint)
        whole = client.store.get_program(fingerprint)
    for position in np.linspace(0, len(whole) - 1, 120, dtype=int).tolist():
        damaged = bytearray(whole)
        damaged[position] ^= 0x10
        with rc.connect("memory://") as client:
            client.store.put_program(fingerprint, bytes(damaged))
            client.offload(vjp, "run/step").wait()
            try:
                outcome = "right" if bits_of(client.backward("run/step")(ramp())) == wanted else "wrong"
            except ResidualStoreError:
                outcome = "refused"
            except Exception as error:  # noqa: BLE001 - the parent says what may happen
                outcome = f"{type(error).__name__}: {error}".replace("\n", " ")
        print(position, outcome, flush=True)


if __name__ == "__main__":
    main()
