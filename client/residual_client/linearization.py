"""Linearization: what a VJP object knows of the function that it differentiates."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

__all__ = ["Linearized", "ResidualInputs"]


@dataclass(frozen=True, kw_only=True)
class Linearized:
    """What a VJP object knows of the function that it differentiates.

    ``saved`` has the abstract value of each argument leaf that the backward reads, by flat position, ``opaque`` that of
    each opaque residual that it reads, and ``structured`` those of the structured residuals in order.
    ``tangents`` has that of each argument leaf's gradient, and ``outputs`` that of each output leaf's cotangent.
    """

    saved: dict[int, Any]
    opaque: dict[int, Any]
    structured: tuple[Any, ...]
    tangents: tuple[Any, ...]
    outputs: tuple[Any, ...]
    function: str
    refs: tuple[int, ...]
    jaxpr: Any


@dataclass(frozen=True, kw_only=True)
class ResidualInputs:
    """The linearized program of a VJP object and its input variables.

    ``opaque`` has those of the opaque residuals that it reads, by their index, and ``tangents`` one for each argument leaf.
    """

    jaxpr: Any
    opaque: dict[int, Any]
    tangents: tuple[Any, ...]
