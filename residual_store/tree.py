"""A tree description: the nodes of a pytree in preorder, so that depth costs nothing and nothing is ever unpickled.

::

    ["leaf"]   ["none"]   ["tuple", n]   ["list", n]   ["custom", n, type, fields, static]
    ["dict", keys]   ["OrderedDict", keys]   ["defaultdict", keys, factory name]

A key is ``["text" | "bytes" | "int" | "float" | "bool", value]``, ``["surrogates", bytes]`` for text that is not
UTF-8, ``["tuple", keys]``, or ``["other", text]`` for a key that can be compared but not built again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from residual_store.errors import InvalidManifest

__all__ = ["Node", "arity", "check_tree", "leaf_count", "split"]

type Node = list[Any]

_COUNTED = {"tuple": 2, "list": 2, "custom": 5}
_KEYED = {"dict": 2, "OrderedDict": 2, "defaultdict": 3}
_KEYS = {
    "text": str,
    "bytes": bytes,
    "surrogates": bytes,
    "int": int,
    "float": float,
    "bool": bool,
    "other": str,
}
_KEY_DEPTH = 8


def arity(node: Node) -> int:
    """The number of children of a node.

    >>> arity(["dict", [["text", "w"]]])
    1
    """
    if node[0] in ("leaf", "none"):
        return 0
    return int(node[1]) if node[0] in _COUNTED else len(node[1])


def leaf_count(nodes: Sequence[Node]) -> int:
    """The number of leaves among some nodes."""
    return sum(node[0] == "leaf" for node in nodes)


def split(nodes: Sequence[Node]) -> list[list[Node]]:
    """The nodes below each child of the root.

    >>> split([["tuple", 2], ["leaf"], ["list", 1], ["leaf"]])
    [[['leaf']], [['list', 1], ['leaf']]]
    """
    parts: list[list[Node]] = []
    missing = 0
    for node in nodes[1:]:
        if not missing:
            parts.append([])
            missing = 1
        parts[-1].append(node)
        missing += arity(node) - 1
    return parts


def check_tree(nodes: Sequence[Any], where: str) -> None:
    """Raise `InvalidManifest` unless the nodes are those of one tree, or none."""
    missing = 1 if nodes else 0
    for index, node in enumerate(nodes):
        if not _is_node(node) or not missing:
            raise InvalidManifest(f"{where}[{index}] is no node of a tree in preorder")
        missing += arity(node) - 1
        if missing > len(nodes) - index - 1:
            raise InvalidManifest(f"{where}[{index}] has more children than nodes follow")


def _is_node(node: Any) -> bool:
    if type(node) is not list or not node or type(node[0]) is not str:
        return False
    kind, rest = node[0], node[1:]
    if kind in _COUNTED:
        texts = all(type(part) is str for part in rest[1:])
        return len(node) == _COUNTED[kind] and type(rest[0]) is int and rest[0] >= 0 and texts
    if kind in _KEYED:
        keys = len(node) == _KEYED[kind] and type(rest[0]) is list and all(_is_key(key) for key in rest[0])
        return keys and all(type(part) is str for part in rest[1:])
    return kind in ("leaf", "none") and not rest


def _is_key(key: Any, depth: int = 0) -> bool:
    if type(key) is not list or len(key) != 2 or type(key[0]) is not str or depth > _KEY_DEPTH:
        return False
    if key[0] == "tuple":
        return type(key[1]) is list and all(_is_key(part, depth + 1) for part in key[1])
    return key[0] in _KEYS and type(key[1]) is _KEYS[key[0]]
