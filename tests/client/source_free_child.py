"""A process that knows nothing of any model and applies stored backwards: ``python -m ... < task > report``.

The task is JSON: ``{"urls": [...], "calls": {name: call}}``, where a call has a key, a cotangent, args and x64.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import jax

import residual_client as rc
from residual_store import open_store
from residual_store.store import Store
from tests.client.bits import bits_of
from tests.client.parcels import unpacked


def _applied(store: Store, call: dict[str, Any]) -> list[str] | str:
    try:
        with jax.enable_x64(call["x64"]):
            args = unpacked(call["args"]) if call["args"] is not None else None
            return bits_of(rc.Client(store).backward(call["key"])(unpacked(call["cotangent"]), args=args))
    except Exception as error:  # noqa: BLE001 - the test of this case shows it, the others go on
        return f"{type(error).__name__}: {error}"


def main() -> None:
    task = json.load(sys.stdin)
    stores = {url: open_store(url) for url in task["urls"]}
    report = {
        name: {url: _applied(store, call) for url, store in stores.items()}
        for name, call in task["calls"].items()
    }
    assert "tests.cases" not in sys.modules
    json.dump(report, sys.stdout)


if __name__ == "__main__":
    main()
