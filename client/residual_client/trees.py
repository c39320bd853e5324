"""Trees: pytree structures written down, compared and built again without pickling anything.

A description is a list of nodes in preorder, so its depth costs nothing.
A node of one of Python's containers can be built again anywhere, if its keys can.
A node of any other type is described by its name, the names of its fields, its static data as text, and the
number of its children; without the type at hand it is built as a tuple, as `jax.vjp` itself does in ``args_res``.
"""

from __future__ import annotations

import dataclasses
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
from jax.tree_util import DictKey, tree_leaves_with_path, tree_structure

from residual_client.jax_compat import TreeDef, is_sentinel
from residual_client.static_data import static_text
from residual_store.tree import Node, arity, leaf_count, split

__all__ = [
    "argument_paths",
    "build",
    "children_of",
    "describe",
    "difference",
    "leaves_of",
    "mirrors",
    "mismatch",
]

_FACTORIES: dict[str, Callable[[], Any]] = {f.__name__: f for f in (list, dict, set, int, float, str, tuple)}


def describe(treedef: TreeDef) -> list[Node]:
    """The nodes of a treedef in preorder.

    >>> describe(tree_structure((1, {"a": 2})))
    [['tuple', 2], ['leaf'], ['dict', [['text', 'a']]], ['leaf']]
    """
    nodes, pending = [], [treedef]
    while pending:
        one = pending.pop()
        nodes.append(_node(one))
        pending.extend(reversed(children_of(one)))
    return nodes


def _node(treedef: TreeDef) -> Node:
    root = node_of(treedef)
    if root is None:
        return ["leaf"]
    kind, static = root
    if kind is type(None):
        return ["none"]
    if kind in (tuple, list):
        return [kind.__name__, len(children_of(treedef))]
    if kind is dict:
        return ["dict", [_key(key) for key in static]]
    if kind is OrderedDict:
        return ["OrderedDict", [_key(key) for key in static]]
    if kind is defaultdict:
        factory, keys = static
        return [
            "defaultdict",
            [_key(key) for key in keys],
            getattr(factory, "__name__", "") if factory else "",
        ]
    return ["custom", len(children_of(treedef)), kind.__qualname__, _field_names(kind), static_text(static)]


def _key(key: object) -> list[Any]:
    if type(key) is str:
        return ["text", key] if _is_utf8(key) else ["surrogates", key.encode("utf-8", "surrogatepass")]
    if type(key) is bool or (type(key) is int and -(1 << 63) <= key < 1 << 63) or type(key) in (float, bytes):
        return [type(key).__name__, key]
    if type(key) is tuple:
        return ["tuple", [_key(part) for part in key]]
    return ["other", static_text(key)]


def _is_utf8(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _field_names(kind: type) -> str:
    """The names of a type's fields in order, where it tells them: two types of one name may have them in another order."""
    names = getattr(kind, "_fields", None)
    if dataclasses.is_dataclass(kind):
        names = [entry.name for entry in dataclasses.fields(kind)]
    return static_text(", ".join(map(str, names or ())))


def build(nodes: Sequence[Node], leaves: Sequence[Any], *, like: Mapping[int, TreeDef] | None = None) -> Any:
    """The tree with this description and these leaves.

    ``like`` has a treedef for some children of the root; it goes first because it knows every type and key.

    >>> build(describe(tree_structure((1, {"a": 2}))), ["x", "y"])
    ('x', {'a': 'y'})
    """
    if nodes[0][0] == "leaf":
        return leaves[0]
    children, start = [], 0
    for index, part in enumerate(split(nodes)):
        own = leaves[start : start + leaf_count(part)]
        given = (like or {}).get(index)
        children.append(_build(iter(part), iter(own)) if given is None else given.unflatten(own))
        start += len(own)
    return _container(nodes[0], children)


def _build(nodes: Iterator[Node], leaves: Iterator[Any]) -> Any:
    """Build one subtree; iterative, so that a deep description cannot exhaust the stack."""
    open_nodes: list[tuple[Node, list[Any]]] = []
    while True:
        node = next(nodes)
        value = next(leaves) if node[0] == "leaf" else None
        if node[0] != "leaf" and arity(node):
            open_nodes.append((node, []))
            continue
        value = value if node[0] == "leaf" else _container(node, [])
        while open_nodes:
            parent, children = open_nodes[-1]
            children.append(value)
            if len(children) < arity(parent):
                break
            open_nodes.pop()
            value = _container(parent, children)
        else:
            return value


def _container(node: Node, children: list[Any]) -> Any:
    if node[0] == "none":
        return None
    if node[0] == "list":
        return children
    if node[0] not in ("dict", "OrderedDict", "defaultdict") or not all(map(_can_be_built, node[1])):
        return tuple(children)
    items = zip(map(_key_value, node[1]), children, strict=True)
    match node[0]:
        case "OrderedDict":
            return OrderedDict(items)
        case "defaultdict":
            return defaultdict(_FACTORIES.get(node[2]), items)
    return dict(items)


def _can_be_built(key: list[Any]) -> bool:
    return all(map(_can_be_built, key[1])) if key[0] == "tuple" else key[0] != "other"


def _key_value(key: list[Any]) -> Any:
    match key[0]:
        case "surrogates":
            return key[1].decode("utf-8", "surrogatepass")
        case "tuple":
            return tuple(map(_key_value, key[1]))
    return key[1]


def difference(recorded: Sequence[Node], given: Sequence[Node], *, root: str) -> str | None:
    """The first place where two descriptions differ, in words, or None.

    A tuple may stand for a node of a custom type with the same number of children.
    """
    paths = [root]
    for one, other in zip(recorded, given, strict=False):
        path = paths.pop()
        if one != other and not _stands_for(one, other):
            return f"{path} was {_said(one, other)} and is {_said(other, one)}"
        paths.extend(reversed([path + part for part in _parts(one)]))
    return None


def _stands_for(recorded: Node, given: Node) -> bool:
    return bool(recorded[0] == "custom" and given[0] == "tuple" and recorded[1] == given[1])


def _parts(node: Node) -> list[str]:
    if node[0] in ("dict", "OrderedDict", "defaultdict"):
        return [f"[{_key_value(key)!r}]" for key in node[1]]
    return [f"[{index}]" for index in range(arity(node))]


def _said(node: Node, other: Node) -> str:
    match node[0]:
        case "leaf":
            return "a leaf"
        case "none":
            return "None"
        case "custom":
            fields = f"({node[3]})" if node[2:3] == other[2:3] and node[3] != other[3] else ""
            return f"a {node[2]}{fields}" + (f" with {node[4]}" if node[4] != "None" else "")
        case "tuple" | "list":
            return f"a {node[0]} of {node[1]}"
    article = "an" if node[0] == "OrderedDict" else "a"
    return f"{article} {node[0]} with the keys {[_key_value(key) for key in node[1]]!r}"


def argument_paths(in_tree: TreeDef) -> list[str]:
    """The path of each argument leaf, such as ``args[0]['w']``.

    Falls back to positions where a custom type refuses to hold placeholders.
    """
    numbers = list(range(in_tree.num_leaves))
    try:
        tree = in_tree.unflatten(numbers)
        paths = tree_leaves_with_path(tree, is_leaf=lambda node: type(node) is int)
    except Exception:  # noqa: BLE001 - a user's class may raise anything here
        paths = []
    if [leaf for _, leaf in paths] != numbers:
        tree = build(describe(in_tree), numbers)
        paths = tree_leaves_with_path(tree)
    return ["args" + "".join(map(_step, path)) for path, _ in paths]


def _step(key: Any) -> str:
    """One step of a path, the same in every process."""
    is_plain = not isinstance(key, DictKey) or _can_be_built(_key(key.key))
    return str(key) if is_plain else f"[{static_text(key.key)}]"


def mirrors(args_res: Any, in_tree: TreeDef) -> str | None:
    """Where ``args_res`` does not have the tree of the arguments, in words, or None.

    `jax.vjp` builds ``args_res`` out of tuples, lists and dicts; a user may put the original objects there.
    A plain dict in place of an OrderedDict would swap values without an error.
    """
    return mismatch(in_tree, tree_structure(tuple(args_res), is_leaf=is_sentinel), root="args")


def mismatch(recorded: TreeDef, given: TreeDef, *, root: str) -> str | None:
    """The first place where two treedefs of this process differ, in words, or None; tuples may stand for any node.

    Static data are compared as JAX does it too, which sees what no text can say, such as which lambda it is.
    """
    pending = [(recorded, given, root)]
    while pending:
        one, other, path = pending.pop()
        node, other_node = _node(one), _node(other)
        if other_node[0] == "tuple" and arity(node) == other_node[1]:
            pass  # As in the VJP objects of JAX.
        elif node != other_node:
            return f"{path} was {_said(node, other_node)} and is {_said(other_node, node)}"
        elif node[0] == "custom" and _class_of(one) is not _class_of(other):
            return f"{path} is a {node[2]}, and that of the forward call is another class of this name: one is defined anew"
        elif not _have_equal_data(one, other):
            return f"{path} has static data that are not equal to those of the forward call: {_said(node, other_node)}"
        inner = [path + part for part in _parts(node)]
        pending.extend(zip(children_of(one), children_of(other), inner, strict=True))
    return None


def _class_of(treedef: TreeDef) -> type | None:
    root = node_of(treedef)
    return None if root is None else root[0]


def _have_equal_data(one: TreeDef, other: TreeDef) -> bool:
    root, other_root = node_of(one), node_of(other)
    if root is None or other_root is None:
        return True
    try:
        return bool(root[1] == other_root[1])
    except Exception:  # noqa: BLE001 - arrays, say, have no one answer; their texts are equal
        return True


def leaves_of(tree: Any) -> list[Any]:
    """The leaves of a tree in which sentinels are leaves too."""
    return jax.tree_util.tree_leaves(tree, is_leaf=is_sentinel)


def node_of(treedef: TreeDef) -> tuple[type, Any] | None:
    """The type and static data of the root of a treedef, or None for a leaf."""
    root: tuple[type, Any] | None = treedef.node_data()
    return root


def children_of(treedef: TreeDef) -> Sequence[TreeDef]:
    """The treedefs of the children of the root."""
    children: Sequence[TreeDef] = treedef.children()
    return children
