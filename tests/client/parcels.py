"""Trees of arrays as JSON, to hand a cotangent to a process that knows nothing of the model."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import tree_flatten

__all__ = ["packed", "unpacked"]


def packed(tree: Any) -> dict[str, Any]:
    """The tree as JSON; a container of a custom type becomes a tuple of its children."""
    leaves: list[Any] = []
    return {"tree": _spelled(tree, leaves), "leaves": [_packed_leaf(leaf) for leaf in leaves]}


def unpacked(parcel: dict[str, Any]) -> Any:
    """The tree that `packed` was given."""
    leaves = [_unpacked_leaf(leaf) for leaf in parcel["leaves"]]
    names = {"leaf": leaves.__getitem__, "OrderedDict": OrderedDict, "defaultdict": defaultdict, "list": list}
    return eval(parcel["tree"], {"__builtins__": {}}, names)


def _spelled(tree: Any, leaves: list[Any]) -> str:
    """A Python expression for the tree in which leaf number n is ``leaf(n)``."""
    kind = type(tree)
    if tree is None:
        return "None"
    if kind in (dict, OrderedDict, defaultdict):
        items = "".join(f"{key!r}: {_spelled(value, leaves)}, " for key, value in tree.items())
        wrapper = {dict: "{}", OrderedDict: "OrderedDict({})", defaultdict: "defaultdict(list, {})"}[kind]
        return wrapper.replace("{}", "{" + items + "}")
    children, _ = tree_flatten(tree, is_leaf=lambda node: node is not tree)
    if len(children) == 1 and children[0] is tree:
        leaves.append(tree)
        return f"leaf({len(leaves) - 1})"
    spelled = "".join(f"{_spelled(child, leaves)}, " for child in children)
    return f"[{spelled}]" if kind is list else f"({spelled})"


def _packed_leaf(leaf: Any) -> dict[str, Any]:
    leaf = leaf if hasattr(leaf, "dtype") else jnp.asarray(leaf)
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return {"keys_of": str(jax.random.key_impl(leaf)), "data": _packed_leaf(jax.random.key_data(leaf))}
    name = "float0" if leaf.dtype == jax.dtypes.float0 else leaf.dtype.name
    return {"dtype": name, "shape": leaf.shape, "hex": np.asarray(leaf).tobytes().hex()}


def _unpacked_leaf(packed: dict[str, Any]) -> Any:
    if "keys_of" in packed:
        return jax.random.wrap_key_data(_unpacked_leaf(packed["data"]), impl=packed["keys_of"])
    dtype = jax.dtypes.float0 if packed["dtype"] == "float0" else jnp.dtype(packed["dtype"])
    if dtype == jax.dtypes.float0:
        return np.zeros(packed["shape"], dtype)
    host = np.frombuffer(bytes.fromhex(packed["hex"]), dtype).reshape(packed["shape"])
    return jnp.asarray(host)
