"""The only module that touches private or version-dependent parts of JAX.

Checked against jax 0.11.2 and 0.12.0.1; the tests run on the lowest and on the locked version.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import jax
from jax import export
from jax._src import (
    api as _api,
    array as _array,
    callback as _callback,
    config as _config,
    core as _core,
    distributed as _distributed,
    effects as _effects,
    source_info_util as _source_info,
)
from jax._src.export import _export
from jax._src.interpreters import mlir as _mlir, partial_eval as _partial_eval
from jax._src.lax.lax import _convert_element_type
from jax._src.lib import _jax  # type: ignore[attr-defined]
from jax._src.lib.mlir import ir as _ir  # type: ignore[attr-defined]
from jax._src.state.types import AbstractRef as _AbstractRef
from jax.extend.core import Primitive

from residual_client.linearization import Linearized, ResidualInputs

__all__ = [
    "NotNeeded",
    "NotSaveable",
    "ResidualEffect",
    "TreeDef",
    "agreed",
    "counted",
    "emit_host_call",
    "host_callbacks",
    "impure",
    "inner_jaxpr",
    "inputs_read",
    "is_fresh",
    "is_literal",
    "is_over_several_devices",
    "is_ref",
    "is_sentinel",
    "is_vjp",
    "key_impl",
    "linearized",
    "relabelled",
    "release_dead_arrays",
    "residual_inputs",
    "source_line",
    "stripped",
    "trace_context",
    "trace_state_clean",
    "with_weak_type",
    "without_locations",
]

NotNeeded = _api.NotNeeded
NotSaveable = _api.NotSaveable

type TreeDef = Any
"""A pytree structure; JAX does not type its methods."""


def is_vjp(value: object) -> bool:
    """Whether ``value`` is a VJP object as `jax.vjp` returns it."""
    return isinstance(value, _api.VJP)


def is_fresh(vjp: Any) -> bool:
    """Whether nothing but this VJP object refers to its program, as after an eager trace.

    A jitted forward keeps the program in its cache and hands it out at every step.
    """
    # One reference is the object's own, the other that of this call.
    return sys.getrefcount(vjp.fun) <= 2


def is_sentinel(value: object) -> bool:
    """Whether ``value`` stands for an argument that was not saved."""
    return isinstance(value, NotNeeded | NotSaveable)


def linearized(vjp: Any) -> Linearized:
    """Read the linearized program of a VJP object."""
    spec, _, jaxpr, out_avals = vjp.fun.args
    end = len(spec) + vjp.in_tree.num_leaves
    read = list(zip(spec, [var.aval for var in jaxpr.invars], strict=False))
    tangents = [var.aval for var in jaxpr.invars[len(spec) : end]]
    refs = tuple(index for index, aval in enumerate(tangents) if isinstance(aval, _AbstractRef))
    return Linearized(
        saved={one.idx: aval for one, aval in read if one.primal},
        opaque={one.idx: aval for one, aval in read if not one.primal},
        structured=tuple(var.aval for var in jaxpr.invars[end:]),
        tangents=tuple(getattr(aval, "inner_aval", aval).to_ct_aval() for aval in tangents),
        outputs=tuple(aval.to_ct_aval() for aval in out_avals),
        function=jaxpr.debug_info.func_src_info or "",
        refs=refs,
        jaxpr=jaxpr,
    )


def residual_inputs(vjp: Any) -> ResidualInputs:
    """Which variables of the linearized program stand for which residuals."""
    spec, _, jaxpr, _ = vjp.fun.args
    pairs = list(zip(spec, jaxpr.invars, strict=False))
    return ResidualInputs(
        jaxpr=jaxpr,
        opaque={one.idx: var for one, var in pairs if not one.primal},
        tangents=tuple(jaxpr.invars[len(spec) : len(spec) + vjp.in_tree.num_leaves]),
    )


def is_literal(atom: Any) -> bool:
    """Whether an operand of an equation is a value written into the jaxpr."""
    return isinstance(atom, _core.Literal)


def inner_jaxpr(equation: Any) -> Any:
    """The jaxpr that an equation calls, or None if it calls none or several."""
    inner = list(_core.jaxprs_in_params(equation.params))
    return getattr(inner[0], "jaxpr", inner[0]) if len(inner) == 1 else None


def source_line(equation: Any) -> str | None:
    """Where the user wrote an operation, as ``path:line``, if JAX has recorded it."""
    found = re.match(r"(.+?:\d+)(:\d+)? \(", _source_info.summarize(equation.source_info))
    return found[1] if found else None


def is_ref(value: Any) -> bool:
    """Whether a value is a mutable array reference, as `jax.new_ref` makes it."""
    try:
        return isinstance(jax.typeof(value), _AbstractRef)
    except TypeError:
        return False


def trace_state_clean() -> bool:
    """Whether JAX traces no function in this thread just now."""
    return bool(_core.trace_state_clean())


def trace_context() -> tuple[Any, ...]:
    """All settings of JAX in this thread that a trace depends on, as `jax.jit` compares them."""
    return tuple(_config.trace_context())


def with_weak_type(array: jax.Array, weak_type: bool) -> jax.Array:
    """The same values as a weakly or strongly typed array; numpy cannot express the difference."""
    changed: jax.Array = _convert_element_type(array, weak_type=weak_type)
    return changed


def relabelled(
    array: jax.Array, *, weak_type: bool | None = None, committed: bool | None = None
) -> jax.Array:
    """The same memory as an array of another weak type, or committed to its devices or not; a copy is never made."""
    weak_type = array.weak_type if weak_type is None else weak_type
    committed = array.committed if committed is None else committed
    if (weak_type, committed) == (array.weak_type, array.committed):
        return array
    aval, buffers = array.aval.update(weak_type=weak_type), [one.data for one in array.addressable_shards]
    return _array.ArrayImpl(aval, array.sharding, buffers, committed=committed, _skip_checks=True)


def release_dead_arrays() -> None:
    """Let go of the host memory under arrays that have died; JAX does so only at its next transfer or garbage collection."""
    _jax.collect_garbage()


def counted(name: str) -> int:
    """How often this job of several processes has counted under this name, now included."""
    return int(_coordinator().key_value_increment(name, 1))


def agreed(name: str, proposal: str | None, *, seconds: float) -> str:
    """The text that one process of this job has proposed under a name, by JAX's coordination service, not by the devices.

    Raises RuntimeError if none has within ``seconds``.
    """
    if proposal is not None:
        _coordinator().key_value_set(name, proposal)
    return str(_coordinator().blocking_key_value_get(name, int(seconds * 1000)))


def _coordinator() -> Any:
    return _distributed.global_state.client


def key_impl(dtype: Any) -> str:
    """The name of the implementation of a PRNG key dtype, such as ``threefry2x32``."""
    return str(dtype._impl.name)


def without_locations(text: str) -> str:
    """StableHLO text without source locations and names of functions, so that a moved or renamed one changes nothing."""
    with _mlir.make_ir_context():
        return _text_of(_ir.Module.parse(text))


def _text_of(module: Any) -> str:
    """The text without locations, and with inner functions numbered, whatever their author has called them."""
    functions = [one for one in module.body.operations if one.operation.name == "func.func"]
    names = [one.attributes["sym_name"].value for one in functions]
    numbered = [name if name == "main" else f"inner_{number}" for number, name in enumerate(names)]
    # First names that are longer than any, so that no two functions ever have one.
    aside = [name if name == "main" else "_" * max(map(len, names)) + f"_{name}" for name in names]
    for before, after in ((names, aside), (aside, numbered)) if names != numbered else ():
        for function, old, new in zip(functions, before, after, strict=True):
            _ir.SymbolTable.replace_all_symbol_uses(old, new, module.operation)
            _ir.SymbolTable.set_symbol_name(function, new)
    return str(module.operation.get_asm(enable_debug_info=False))


def stripped(program: export.Exported) -> export.Exported:
    """The same program without source locations and names of functions: its bytes say nothing of where it was written."""
    with _mlir.make_ir_context():
        module = _ir.Module.parse(_text_of(_ir.Module.parse(program.mlir_module())))
        return replace(program, mlir_module_serialized=_export._module_to_bytecode(module))


def inputs_read(jaxpr: Any, outputs: bool | list[bool] = True) -> list[bool]:
    """Which inputs of a jaxpr any of these ``outputs`` or its effects depend on; one does unless an operation rules it out."""
    _, read = _partial_eval.dce_jaxpr(jaxpr, outputs)
    return list(read)


def host_callbacks(jaxpr: Any) -> Iterator[tuple[Any, TreeDef]]:
    """Every Python function that a (closed) jaxpr calls on the host, in order, with the treedef of its operands."""
    for equation in getattr(jaxpr, "jaxpr", jaxpr).eqns:
        callback = equation.params.get("callback")
        if callback is not None:
            operands = getattr(callback, "in_tree", None) or jax.tree.structure(())
            yield getattr(callback, "callback_func", callback), operands
        for inner in _core.jaxprs_in_params(equation.params):
            yield from host_callbacks(inner)


class ResidualEffect(_effects.Effect):
    """What JAX names when it refuses a function that calls the host; JAX prints it in its own error."""

    def __repr__(self) -> str:
        return (
            "residuals in a store; write client.offloaded(jax.checkpoint(f)) "
            "instead of jax.checkpoint(client.offloaded(f))"
        )


for _allowed in (_effects.lowerable_effects, _effects.control_flow_allowed_effects):
    _allowed.add_type(ResidualEffect)


def impure(primitive: Primitive, results: Callable[..., Sequence[Any]]) -> None:
    """Make calls of ``primitive``, whose abstract results are ``results``, such that JAX neither drops nor merges them.

    JAX's own effect stands beside ours because `jax.vmap` of `jax.lax.cond` refuses no other.
    """
    both = {_callback._IOEffect, ResidualEffect()}
    primitive.def_effectful_abstract_eval(lambda *operands, **params: (results(*operands, **params), both))


def is_over_several_devices(ctx: Any) -> bool:
    """Whether the program that is being lowered runs on more than one device."""
    axes = ctx.module_context.axis_context
    mesh = getattr(axes, "mesh", None)
    return bool((getattr(axes, "num_devices", None) or 1 if mesh is None else mesh.size) > 1)


def emit_host_call(
    ctx: Any, function: Callable[..., Sequence[Any]], operands: Sequence[Any]
) -> Sequence[Any]:
    """Lower a call of ``function``, which gets numpy arrays and returns numpy arrays.

    `jax.experimental.io_callback` would put the operands onto a device again, inside of the callback.
    Inside of `jax.jit` over several devices the call is made once, on the first of them, and inside of `jax.shard_map`
    once on each.
    """
    results, _, _ = _callback.emit_python_callback(
        ctx,
        function,
        None,
        list(operands),
        ctx.avals_in,
        ctx.avals_out,
        has_side_effect=True,
        returns_token=False,
        sharding=_callback._callback_op_sharding(ctx.module_context.axis_context, None, ctx.avals_out),
    )
    return results
