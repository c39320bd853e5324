"""A process with as many devices as its environment says, which tries to use what four devices have made.

``python -m tests.client.few_devices_child URL NAME...`` prints JSON: for each case, what each way to it says.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any

import jax

import residual_client as rc
from tests.cases.arguments import layer
from tests.cases.case import matrix


def _said(call: Callable[[], Any]) -> str:
    try:
        call()
    except Exception as error:  # noqa: BLE001 - the parent says which error it must be
        return f"{type(error).__name__}: {error}"
    return "nothing was refused"


def main() -> None:
    url, *names = sys.argv[1:]
    with rc.connect(url) as client:
        like = jax.eval_shape(jax.jit(lambda w, x: jax.vjp(layer, w, x)[1]), matrix(), matrix(8, 4))
        report = {
            name: {
                "backward": _said(lambda name=name: client.backward(f"devices/{name}")),  # type: ignore[misc]
                "like": _said(lambda name=name: client.restore(f"devices/{name}", like=like)),  # type: ignore[misc]
            }
            for name in names
        }
    print(json.dumps(report))


if __name__ == "__main__":
    main()
