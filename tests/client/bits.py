"""What must not change on the way through a store: tree, shape, dtype and every bit."""

from __future__ import annotations

import hashlib
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import keystr, tree_flatten_with_path

__all__ = ["bits_of"]


def bits_of(tree: Any) -> list[str]:
    """A tree of arrays in lines of text: its structure, then path, dtype, shape and bytes of each leaf.

    Two trees have equal lines if and only if they are equal bit for bit, in this process or in another; the address of
    a function in the structure does not count.
    """
    leaves, treedef = tree_flatten_with_path(tree)
    structure = re.sub(" at 0x[0-9a-f]+", "", ascii(treedef))
    return [structure, *(f"{keystr(path)!a} {_one(leaf)}" for path, leaf in leaves)]


def _one(leaf: Any) -> str:
    host = np.asarray(jax.random.key_data(leaf) if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) else leaf)
    name = "float0" if leaf.dtype == jax.dtypes.float0 else str(leaf.dtype)
    content = host.tobytes().hex()
    return f"{name} {host.shape} {content if len(content) <= 200 else hashlib.sha256(host.tobytes()).hexdigest()}"
