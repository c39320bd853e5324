"""VJP objects of every kind that JAX makes, each as a small case with a cotangent.

Nothing here knows of a store or of pytest, so that another process can import a case by its name:

>>> from tests.cases import CASES
>>> case = CASES["vjp_plain_layer"]()
>>> y, f_vjp = case.forward()
>>> gradients = f_vjp(case.cotangent_of(y))
"""

from __future__ import annotations

from tests.cases import (
    arguments,
    control_flow,
    dtypes,
    layers,
    remat,
    rules,
    shapes,
    sharded,
    structured,
    trees,
)
from tests.cases.case import CASES, Case

__all__ = [
    "CASES",
    "Case",
    "arguments",
    "control_flow",
    "dtypes",
    "layers",
    "remat",
    "rules",
    "shapes",
    "sharded",
    "structured",
    "trees",
]
