"""Residual Store: the format and the engine, without JAX and without a web framework.

>>> with open_store("memory://") as store:
...     _ = store.put("run/name", Bundle.of_arrays({"h": np.arange(3.0)}))
...     store.get("run/name").array(0)
array([0., 1., 2.])
"""

from residual_store import errors
from residual_store.bundle import Bundle
from residual_store.manifest import Manifest
from residual_store.settings import Settings
from residual_store.store import Page, Receipt, Stat, Store, Usage, open_store

__all__ = [
    "Bundle",
    "Manifest",
    "Page",
    "Receipt",
    "Settings",
    "Stat",
    "Store",
    "Usage",
    "errors",
    "open_store",
]
