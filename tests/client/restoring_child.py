"""A process that imports the cases and restores what another process has stored: ``python -m ... < task > report``.

The task is JSON: ``{"urls": [...], "names": [...]}``; the report has one entry for each URL and name.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import residual_client as rc
from residual_store import open_store
from residual_store.store import Store
from tests.cases import CASES
from tests.client.bits import bits_of

__all__ = ["key_of"]


def key_of(name: str) -> str:
    """Where the bundle of a case is stored for other processes."""
    return f"elsewhere/{name}"


def _report(stores: dict[str, Store], name: str) -> dict[str, Any]:
    case = CASES[name]()
    report: dict[str, Any] = {}
    with case.context():
        y, like = case.forward()
        like = case.like() if case.jit else like
        for url, store in stores.items():
            try:
                restored = rc.Client(store).restore(key_of(name), like=like, args=case.args)
                report[url] = bits_of(restored(case.cotangent_of(y)))
            except Exception as error:  # noqa: BLE001 - the test of this case shows it, the others go on
                report[url] = f"{type(error).__name__}: {error}"
    return report


def main() -> None:
    task = json.load(sys.stdin)
    stores = {url: open_store(url) for url in task["urls"]}
    json.dump({name: _report(stores, name) for name in task["names"]}, sys.stdout)


if __name__ == "__main__":
    main()
