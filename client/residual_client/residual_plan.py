"""The plan of a forward: which residuals its backward reads, and which of them go to a store."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

from jax.extend.core import jaxpr_as_fun
from jax.tree_util import tree_structure

from residual_client.depot import Place
from residual_client.jax_compat import TreeDef, inputs_read, linearized
from residual_client.passage import Passage
from residual_client.vjp import residuals_of

__all__ = ["Plan"]


@dataclass(frozen=True)
class _Source:
    """Where the backward finds a leaf: among the operands that are carried, or among what is stored."""

    is_carried: bool
    position: int


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A forward that was traced once, so that every execution and its backward agree on what is saved.

    ``program`` maps the operands to ``outputs`` outputs and to the leaves of a VJP object of the structure ``vjp``.
    ``carried`` has the operands that are leaves and are alive anyway, and ``stored`` the leaves that go to a store, each
    array once; ``is_constant`` says that these are the same for all operands.
    """

    program: Any
    outputs: int
    vjp: TreeDef
    sources: tuple[_Source, ...]
    carried: tuple[int, ...]
    stored: tuple[int, ...]
    is_constant: bool
    passages: tuple[Passage, ...]
    places: tuple[Place, ...]

    @classmethod
    def of(cls, program: Any, vjp: Any, *, saveable: Sequence[bool], longest_path: int) -> Self:
        """The plan of a program that returns outputs and the abstract VJP object ``vjp``.

        Operands that are not ``saveable`` are never stored.
        Raises `LeafUnavailable` for a leaf that no host function can take.
        """
        residuals = residuals_of(vjp, linearized(vjp), longest_path=longest_path)
        outputs = len(program.jaxpr.outvars) - len(residuals)
        variables = program.jaxpr.outvars[outputs:]
        alive = {id(var): index for index, var in enumerate(program.jaxpr.invars) if not saveable[index]}
        carried, stored = dict[int, int](), dict[int, int]()
        sources = []
        for index, var in enumerate(variables):
            group, value = (carried, alive[id(var)]) if id(var) in alive else (stored, index)
            group.setdefault(id(var), value)
            sources.append(_Source(group is carried, list(group).index(id(var))))
        kept = set(stored.values())
        is_stored = [False] * outputs + [index in kept for index in range(len(residuals))]
        return cls(
            program=program,
            outputs=outputs,
            vjp=tree_structure(vjp),
            sources=tuple(sources),
            carried=tuple(carried.values()),
            stored=tuple(stored.values()),
            is_constant=not any(inputs_read(program.jaxpr, is_stored)),
            passages=tuple(
                Passage.of(variables[index].aval, residuals[index].path) for index in stored.values()
            ),
            places=tuple(Place(residuals[index].channel, residuals[index].path) for index in stored.values()),
        )

    def run(self, operands: Sequence[Any]) -> tuple[list[Any], list[Any], list[Any]]:
        """Outputs, carried operands, and what is to be stored as it travels."""
        results = jaxpr_as_fun(self.program)(*operands)
        outputs, leaves = results[: self.outputs], results[self.outputs :]
        travelling = [
            passage.out(leaves[index]) for passage, index in zip(self.passages, self.stored, strict=True)
        ]
        return outputs, [operands[index] for index in self.carried], travelling

    def vjp_of(self, carried: Sequence[Any], travelled: Sequence[Any]) -> Any:
        """The VJP object again."""
        stored = [passage.back(host) for passage, host in zip(self.passages, travelled, strict=True)]
        leaves = [(carried if source.is_carried else stored)[source.position] for source in self.sources]
        return self.vjp.unflatten(leaves)
