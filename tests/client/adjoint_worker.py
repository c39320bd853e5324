"""A worker in a process of its own that serves the adjoints of a sine, and refuses negative inputs.

``python -m tests.client.adjoint_worker URL KEY COUNT``
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

import residual_client as rc


def _adjoint(x: Any, y_bar: Any) -> Any:
    if (x["at"] < 0).any():
        raise ValueError(f"no field at {x['at'].tolist()}")
    return {"at": np.cos(x["at"]) * y_bar, "unit": None}


def main() -> None:
    url, key, count = sys.argv[1:]
    with rc.connect(url) as client:
        print(rc.serve_adjoints(client, _adjoint, key, most=int(count), idle_seconds=60))


if __name__ == "__main__":
    main()
