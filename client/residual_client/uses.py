"""Uses: which operations of the linearized program read a residual, and what that says of where it comes from."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp

from residual_client.jax_compat import inner_jaxpr, is_literal, source_line
from residual_client.linearization import ResidualInputs
from residual_client.origins import Origin, at_line

__all__ = ["users_of"]

_PRODUCTS = {"dot_general", "conv_general_dilated"}
_DEEPEST = 50


@dataclass(frozen=True, kw_only=True)
class _Use:
    """One operation that reads a residual.

    ``is_alone`` says that it multiplies a derivative, and that the other term of the product rule is missing.
    """

    operation: str
    source: str | None
    is_alone: bool


def users_of(inputs: ResidualInputs, paths: Sequence[str], indices: Sequence[int]) -> list[Origin]:
    """The origin of the opaque residuals ``indices``, as far as the linearized program tells.

    ``paths`` are those of the arguments in order.
    """
    return [_origin(inputs, inputs.opaque.get(index), paths) for index in indices]


def _origin(inputs: ResidualInputs, var: Any, paths: Sequence[str]) -> Origin:
    if var is None:
        return Origin(kind="computed", text="not read by the backward")
    uses = list(_uses(inputs.jaxpr, var, set(inputs.tangents), None, 0))
    text = "used by " + (at_line(uses[0].operation, uses[0].source) if uses else "nothing that is known")
    more = len({use.source for use in uses[1:]} - {use.source for use in uses[:1]})
    text += f" and {more} more" if more else ""
    source = uses[0].source if uses else None
    if of := _cast_of(inputs, var, paths):
        return Origin(kind="copy", text=text, source=source, looks_like=f"{of} as {var.aval.dtype}")
    if var.aval.ndim >= 2 and _looks_captured(uses):
        return Origin(kind="captured", text=text, source=source, looks_like="a captured weight")
    return Origin(kind="computed", text=text, source=source)


def _looks_captured(uses: Sequence[_Use]) -> bool:
    """A factor whose product has no term with its own derivative does not depend on the arguments."""
    return any(use.is_alone for use in uses) and all(use.operation.split()[0] in _PRODUCTS for use in uses)


def _uses(jaxpr: Any, var: Any, tangents: set[Any], outer: str | None, depth: int) -> Iterator[_Use]:
    """Every operation that reads ``var``, in calls within too; ``tangents`` grows with what depends on them."""
    for eqn in jaxpr.eqns:
        read = [atom for atom in eqn.invars if not is_literal(atom)]
        linear = any(atom in tangents for atom in read)
        if linear:
            tangents.update(eqn.outvars)
        if var not in read:
            continue
        source = source_line(eqn) or outer
        inner = inner_jaxpr(eqn)
        if inner is not None and len(inner.invars) == len(eqn.invars) and depth < _DEEPEST:
            pairs = list(zip(eqn.invars, inner.invars, strict=True))
            within = {one for atom, one in pairs if not is_literal(atom) and atom in tangents}
            name = eqn.params.get("name")
            for one in (one for atom, one in pairs if atom is var):
                for use in _uses(inner, one, set(within), source, depth + 1):
                    yield _named(use, name)
        else:
            yield _Use(
                operation=eqn.primitive.name,
                source=source,
                is_alone=linear and eqn.primitive.name in _PRODUCTS and not _has_sibling(jaxpr, eqn),
            )


def _named(use: _Use, name: Any) -> _Use:
    if not isinstance(name, str) or " in " in use.operation:
        return use
    return _Use(operation=f"{use.operation} in {name}", source=use.source, is_alone=use.is_alone)


def _has_sibling(jaxpr: Any, eqn: Any) -> bool:
    """Whether the result is added to another product, as the product rule does."""
    made_by = {var: one for one in jaxpr.eqns for var in one.outvars}
    for one in jaxpr.eqns:
        if one.primitive.name == "add_any" and eqn.outvars[0] in one.invars:
            others = [atom for atom in one.invars if atom is not eqn.outvars[0] and not is_literal(atom)]
            if any(atom in made_by and made_by[atom].primitive.name in _PRODUCTS for atom in others):
                return True
    return False


def _cast_of(inputs: ResidualInputs, var: Any, paths: Sequence[str]) -> str | None:
    """The arguments of this shape whose derivatives are cast to this dtype, which they do not have themselves."""
    if not jnp.issubdtype(var.aval.dtype, jnp.inexact) or not math.prod(var.aval.shape):
        return None
    found = [
        path
        for path, tangent in zip(paths, inputs.tangents, strict=True)
        if getattr(tangent.aval, "shape", None) == var.aval.shape
        and tangent.aval.dtype != var.aval.dtype
        and any(
            eqn.primitive.name == "convert_element_type"
            and eqn.invars[0] is tangent
            and eqn.outvars[0].aval.dtype == var.aval.dtype
            for eqn in inputs.jaxpr.eqns
        )
    ]
    return " or ".join(found) or None
