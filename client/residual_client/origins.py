"""Origins: which argument, captured value or line of the model a residual comes from.

Two jaxprs tell of it.
The linearized program of a VJP object says which operation *uses* a residual, and where the operation was written whose
derivative that is; it is always at hand, see `uses`.
The trace of the forward says which operation *made* it; for that the forward is needed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import jax
from jax.tree_util import tree_flatten, tree_leaves

from residual_client.jax_compat import inner_jaxpr, is_literal, is_vjp, source_line
from residual_client.trees import argument_paths
from residual_store.errors import ProgramMismatch

__all__ = ["Kind", "Origin", "at_line", "makers_of"]

type Kind = Literal["argument", "copy", "captured", "computed"]

_CALLS = {
    "checkpoint",
    "closed_call",
    "core_call",
    "custom_jvp_call",
    "custom_vjp_call",
    "jit",
    "pjit",
    "remat2",
    "scan",
    "shard_map",
}
_MOVES = {
    "convert_element_type",
    "copy",
    "copy_p",
    "expand_dims",
    "optimization_barrier",
    "pvary",
    "reduce_precision",
    "reshape",
    "sharding_constraint",
    "squeeze",
    "transpose",
}


@dataclass(frozen=True, kw_only=True)
class Origin:
    """Where a residual comes from: what is known of it in words, and the place in the source as ``path:line``.

    ``looks_like`` says what ``kind`` was guessed from, where no trace of the forward has shown it.
    """

    kind: Kind
    text: str
    source: str | None = None
    looks_like: str | None = None


def at_line(operation: str, source: str | None) -> str:
    """An operation and the last part of its place.

    >>> at_line("sin", "/home/me/model.py:12")
    'sin at model.py:12'
    """
    if source is None:
        return operation
    path, _, line = source.rpartition(":")
    return f"{operation} at {Path(path).name}:{line}"


def makers_of(forward: Callable[..., Any], args: Sequence[Any], avals: Sequence[Any]) -> list[Origin]:
    """The origin of each leaf of the VJP object among what ``forward(*args)`` returns; nothing is run.

    ``avals`` are the leaves of the VJP object in question.
    Raises `ProgramMismatch` if the forward returns none with such leaves.
    """
    jaxpr, shapes = jax.make_jaxpr(forward, return_shape=True)(*args)
    parts = tree_flatten(shapes, is_leaf=is_vjp)[0]
    start, wanted = 0, [(tuple(one.shape), one.dtype) for one in avals]
    for part in parts:
        leaves = tree_leaves(part)
        stop = start + len(leaves)
        if is_vjp(part) and [(tuple(one.shape), one.dtype) for one in leaves] == wanted:
            paths = argument_paths(tree_flatten(tuple(args))[1])
            frame = _Frame.of(jaxpr, None)
            return [_made(frame, atom, paths) for atom in jaxpr.outvars[start:stop]]
        start = stop
    raise ProgramMismatch(
        "forward(*args) returns no VJP object with such residuals; pass the function that made this one, "
        "such as lambda W, x: jax.vjp(layer, W, x), and its arguments, which may be abstract"
    )


@dataclass(frozen=True, kw_only=True, eq=False)
class _Frame:
    """A jaxpr, the equation that makes each of its variables, and the equation that it is called from."""

    jaxpr: Any
    made_by: dict[Any, tuple[Any, int]]
    caller: tuple[_Frame, Any] | None

    @classmethod
    def of(cls, jaxpr: Any, caller: tuple[_Frame, Any] | None) -> _Frame:
        made_by = {var: (eqn, place) for eqn in jaxpr.eqns for place, var in enumerate(eqn.outvars)}
        return cls(jaxpr=jaxpr, made_by=made_by, caller=caller)

    def line_of(self, eqn: Any) -> str | None:
        source = source_line(eqn)
        if source is None and self.caller is not None:
            return self.caller[0].line_of(self.caller[1])
        return source


def _made(frame: _Frame, atom: Any, paths: Sequence[str]) -> Origin:
    """Follow an output back to what made it, through calls and through what only moves or casts it."""
    wanted, moved = atom.aval, False
    while True:
        if is_literal(atom):
            return Origin(kind="computed", text="a number in the function")
        if atom in frame.jaxpr.constvars:
            return Origin(
                kind="captured", text=_copied("a value captured by the function", atom, wanted, moved)
            )
        if atom in frame.made_by:
            eqn, place = frame.made_by[atom]
            if eqn.primitive.name in _MOVES:
                atom, moved = eqn.invars[place], True
                continue
            inner = inner_jaxpr(eqn) if eqn.primitive.name in _CALLS else None
            if inner is None or len(inner.outvars) != len(eqn.outvars):
                source = frame.line_of(eqn)
                return Origin(kind="computed", text=at_line(eqn.primitive.name, source), source=source)
            frame, atom = _Frame.of(inner, (frame, eqn)), inner.outvars[place]
            continue
        index = frame.jaxpr.invars.index(atom)
        if frame.caller is None:
            kind: Kind = "copy" if moved else "argument"
            return Origin(kind=kind, text=_copied(paths[index], atom, wanted, moved))
        frame, eqn = frame.caller
        if eqn.primitive.name == "scan":
            source = frame.line_of(eqn)
            return Origin(kind="computed", text=at_line("an input of scan", source), source=source)
        atom, moved = eqn.invars[index], moved or eqn.primitive.name == "shard_map"


def _copied(what: str, atom: Any, wanted: Any, moved: bool) -> str:
    if not moved:
        return what
    return f"{what} as {wanted.dtype}" if atom.aval.dtype != wanted.dtype else f"a copy of {what}"
