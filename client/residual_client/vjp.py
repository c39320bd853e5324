"""A VJP object taken apart and put together: residuals, arguments, and what must be given back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import keystr, tree_flatten, tree_leaves_with_path

from residual_client.jax_compat import (
    NotNeeded,
    TreeDef,
    is_ref,
    is_sentinel,
    is_vjp,
    linearized,
    with_weak_type,
)
from residual_client.linearization import Linearized
from residual_client.transfer import Residual, abstract, is_key
from residual_client.trees import (
    argument_paths,
    children_of,
    describe,
    difference,
    leaves_of,
    mirrors,
    mismatch,
)
from residual_store.bundle import digest_of
from residual_store.dtypes import FLOAT0
from residual_store.errors import ArgumentMismatch, LeafUnavailable
from residual_store.leaf import Channel
from residual_store.manifest import Argument, State
from residual_store.tree import leaf_count, split

__all__ = [
    "argument_digest",
    "arguments_of",
    "check_arguments",
    "check_vjp",
    "fill",
    "in_tree_of",
    "residuals_of",
]


def check_vjp(vjp: Any, read: Callable[[Any], Linearized] = linearized) -> Linearized:
    """What the VJP object knows of its function; raises TypeError or `ArgumentMismatch` if it is no sound VJP.

    ``read`` gives that of a sound one, such as `ProgramCache.linearized`, which is faster the second time.
    """
    if not is_vjp(vjp):
        pair = isinstance(vjp, tuple) and len(vjp) == 2 and is_vjp(vjp[1])
        raise TypeError(
            f"offload and like= take the VJP object that jax.vjp returns, and this is a {type(vjp).__name__}"
            + ("; pass its second element" if pair else "")
        )
    if text := mirrors(vjp.args_res, vjp.in_tree):
        raise ArgumentMismatch(
            f"args_res no longer has the tree of the arguments: {text}; "
            "assign values with the container types of the original call"
        )
    return read(vjp)


def residuals_of(vjp: Any, known: Linearized, *, longest_path: int) -> list[Residual]:
    """The leaves of a VJP object in its own order, each with its channel, its path, and what the backward expects."""
    found = []
    for index, (path, value) in enumerate(
        zip(argument_paths(vjp.in_tree), leaves_of(vjp.args_res), strict=True)
    ):
        if not is_sentinel(value):
            path = shortened(path, longest_path)
            found.append(
                Residual(channel="args_res", path=path, value=value, expected=known.saved.get(index))
            )
    channels: dict[Channel, dict[int, Any]] = {
        "opaque_residuals": known.opaque,
        "structured_residuals": dict(enumerate(known.structured)),
    }
    for channel, expected in channels.items():
        for index, (keys, value) in enumerate(tree_leaves_with_path(getattr(vjp, channel))):
            path = shortened(channel + keystr(keys), longest_path)
            found.append(Residual(channel=channel, path=path, value=value, expected=expected.get(index)))
    return found


def arguments_of(vjp: Any, known: Linearized, *, longest_path: int) -> tuple[Argument, ...]:
    """State and abstract value of each argument leaf.

    JAX records the abstract value of an argument that the backward reads; for the others, that of its gradient stands.
    """
    arguments = []
    for index, (path, value) in enumerate(
        zip(argument_paths(vjp.in_tree), leaves_of(vjp.args_res), strict=True)
    ):
        state: State = "saved"
        aval = abstract(known.saved.get(index, known.tangents[index]))
        if is_sentinel(value):
            state = "not_needed" if isinstance(value, NotNeeded) else "not_saveable"
        elif index not in known.saved:
            aval = abstract(value)
        path = shortened(path, longest_path)
        arguments.append(Argument(path=path, state=state, needed=index in known.saved, aval=aval))
    return tuple(arguments)


def shortened(path: str, longest: int) -> str:
    """A path that fits into a manifest; the middle of a longer one is left out."""
    if len(path) <= longest:
        return path
    half = (longest - 3) // 2
    return f"{path[:half]}...{path[-half:]}"


def in_tree_of(treedef: TreeDef) -> TreeDef:
    """The treedef of the arguments, out of that of a VJP object."""
    in_tree: TreeDef = treedef.unflatten(range(treedef.num_leaves)).in_tree
    return in_tree


def check_arguments(
    args: Sequence[Any] | None,
    arguments: Sequence[Argument],
    in_tree: Sequence[list[Any]],
    *,
    treedef: TreeDef | None = None,
) -> dict[int, Any]:
    """The values in ``args`` by flat position, checked against what was recorded.

    ``args`` has one entry for each positional argument, None for one that needs nothing.
    ``treedef`` is that of the arguments, where this process has it: it knows more of static data than ``in_tree``.
    Raises `ArgumentMismatch`, which names the leaf: another tree type, count, shape, dtype or content.
    """
    if args is None:
        return {}
    if not isinstance(args, tuple | list):
        raise ArgumentMismatch(
            f"args is a {type(args).__name__}; pass a tuple with one entry per positional argument"
        )
    count = in_tree[0][1]
    if len(args) != count:
        raise ArgumentMismatch(
            f"args has length {len(args)} and the function was called with {count} arguments"
        )
    values: dict[int, Any] = {}
    treedefs = [None] * count if treedef is None else children_of(treedef)
    position = 0
    for index, nodes in enumerate(split(in_tree)):
        if args[index] is not None:
            given = _checked_tree(args[index], nodes, treedefs[index], f"args[{index}]")
            values |= {position + offset: value for offset, value in enumerate(given)}
        position += leaf_count(nodes)
    return {index: _checked_leaf(value, arguments[index]) for index, value in values.items()}


def _checked_tree(arg: Any, nodes: list[list[Any]], recorded: TreeDef | None, path: str) -> list[Any]:
    leaves, treedef = tree_flatten(arg)
    text = difference(nodes, describe(treedef), root=path)
    if text is None and recorded is not None:
        text = mismatch(recorded, treedef, root=path)
    if text is not None:
        raise ArgumentMismatch(
            f"the tree differs from that of the forward call: {text}; "
            "values are matched by position, so the container types must be the same"
        )
    return leaves


def _checked_leaf(value: Any, argument: Argument) -> Any:
    if is_ref(value):
        return value
    if isinstance(value, jax.Array) and not isinstance(value, jax.core.Tracer) and value.is_deleted():
        raise ArgumentMismatch(
            f"{argument.path} was deleted or donated; pass a living array", leaf=argument.path
        )
    array = value if isinstance(value, jax.Array) else _canonical(value, argument)
    given, wanted = abstract(array), argument.aval
    if wanted is None:
        return array
    if given.shape != wanted.shape or wanted.dtype not in (given.dtype, FLOAT0):
        raise ArgumentMismatch(
            f"{argument.path} was {wanted} at the forward call and is {given}; pass the value of the forward call",
            leaf=argument.path,
        )
    if argument.digest is not None and isinstance(array, jax.core.Tracer):
        raise ArgumentMismatch(
            f"{argument.path} is being traced, so its values cannot be compared with those of the forward call; "
            "apply the backward outside of jax.jit",
            leaf=argument.path,
        )
    if argument.digest is not None and argument.digest != argument_digest(array):
        raise ArgumentMismatch(
            f"{argument.path} has other values than at the forward call, so the gradient would be wrong; "
            "pass the values of the forward call, such as the weights before the update",
            leaf=argument.path,
        )
    if argument.state == "not_saveable" and given.weak_type != wanted.weak_type:
        return with_weak_type(array, wanted.weak_type)
    return array


def _canonical(value: Any, argument: Argument) -> Any:
    """What `jax.vjp` would have made of this value."""
    if isinstance(value, np.ndarray) and value.dtype == jax.dtypes.float0:
        return value
    try:
        return jnp.asarray(value)
    except (TypeError, ValueError) as error:
        raise ArgumentMismatch(
            f"{argument.path} is a {type(value).__name__}: {error}", leaf=argument.path
        ) from error


def argument_digest(value: Any) -> bytes:
    """The xxh3-128 of an argument's bytes in C order; raises `LeafUnavailable` if it lies on several processes."""
    if isinstance(value, jax.Array) and not value.is_fully_addressable:
        raise LeafUnavailable(
            f"an argument of shape {value.shape} lies on devices of several processes, and no digest of it can be "
            "taken in one of them; leave args out"
        )
    host = np.asarray(jax.random.key_data(value) if is_key(value) else value)
    return digest_of(np.ascontiguousarray(host).reshape(-1).view(np.uint8))


def fill(vjp: Any, values: dict[int, Any], arguments: Sequence[Argument], *, complete: bool) -> Any:
    """The VJP object with its not-saveable arguments put back from ``values``; saved ones stay as they are.

    With ``complete``, raises `ArgumentMismatch` naming the first argument that is still missing.
    """
    tree: TreeDef
    leaves, tree = tree_flatten(vjp.args_res, is_leaf=is_sentinel)
    for index, argument in enumerate(arguments):
        if argument.state != "not_saveable" or not is_sentinel(leaves[index]):
            continue
        if index in values:
            leaves[index] = values[index]
        elif complete and argument.needed:
            raise ArgumentMismatch(
                f"{argument.path} was marked not saveable, so its value is not in the bundle; pass it in args",
                leaf=argument.path,
            )
    return vjp.replace(args_res=list(tree.unflatten(leaves)))
