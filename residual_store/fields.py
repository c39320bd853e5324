"""Reading a msgpack map that may be hostile, field by field.

Each reader names the place, such as ``leaves[3].shape``, in the error that it raises.
What no reader asked for is refused at the end, so a misspelt or smuggled field does not pass.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import msgpack

from residual_store.errors import InvalidManifest
from residual_store.settings import Settings
from residual_store.tree import check_tree

__all__ = ["Fields", "is_shape", "unpack"]

type Scalar = Any

_MISSING = object()
_CONTAINERS_PER_LEAF = 10


def unpack(data: bytes, settings: Settings) -> Fields:
    """The one map in ``data``; raises `InvalidManifest` for anything else.

    Duplicate keys are refused here because msgpack lets the last one win silently, and containers are counted because
    an empty one takes a byte in ``data`` and a hundred in memory.
    """
    count = _Count(settings.max_leaves * _CONTAINERS_PER_LEAF)
    try:
        content = msgpack.unpackb(
            data,
            raw=False,
            strict_map_key=True,
            object_pairs_hook=count.pairs,
            list_hook=count.items,
            max_str_len=max(settings.max_path_chars, settings.max_user_chars) * 4,
            max_bin_len=settings.max_path_chars * 4,
            max_array_len=settings.max_tree_nodes,
            max_map_len=settings.max_tree_nodes,
            max_ext_len=0,
        )
    except InvalidManifest:
        raise
    except Exception as error:  # noqa: BLE001 - msgpack raises a dozen unrelated types on hostile input
        reason = f"{type(error).__name__}: {str(error)[:100]}"
        raise InvalidManifest(f"the manifest is not one msgpack map: {reason}") from None
    if not isinstance(content, dict):
        raise InvalidManifest(f"the manifest is a msgpack {type(content).__name__}; it must be a map")
    return Fields(content, "")


class _Count:
    """Counts maps and lists as they are built, and stops at a limit."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._left = limit

    def items(self, items: list[Any]) -> list[Any]:
        self._left -= 1
        if self._left < 0:
            raise InvalidManifest(
                f"the manifest has more than {self._limit} maps and lists, 10 for each of max_leaves"
            )
        return items

    def pairs(self, pairs: list[tuple[Any, Any]]) -> dict[Any, Any]:
        self.items(pairs)
        content = dict(pairs)
        if len(content) != len(pairs):
            raise InvalidManifest("a map of the manifest has a key twice")
        return content


class Fields:
    """One map being read; ``where`` is its place in the manifest.

    Types are compared with type() and not isinstance(): True must not pass for the integer 1.
    """

    def __init__(self, content: dict[str, Any], where: str) -> None:
        self._rest = content
        self._where = where

    def _take(self, name: str) -> Any:
        return self._rest.pop(name, _MISSING)

    def _refuse(self, name: str, value: object, wanted: str) -> InvalidManifest:
        shown = "missing" if value is _MISSING else _clipped(value)
        return InvalidManifest(f"{self._where}{name} is {shown}; it must be {wanted}")

    def finish(self) -> None:
        """Raise `InvalidManifest` if a field is left that no reader asked for."""
        if self._rest:
            unknown = _clipped(min(self._rest, key=str))
            raise InvalidManifest(f"{self._where or 'the manifest'} has the unknown field {unknown}")

    def integer(self, name: str, low: int, high: int) -> int:
        value = self._take(name)
        if type(value) is not int or not low <= value <= high:
            raise self._refuse(name, value, f"an integer from {low} to {high}")
        return value

    def optional_integer(self, name: str, low: int, high: int) -> int | None:
        return None if self._absent(name) else self.integer(name, low, high)

    def number(self, name: str) -> float:
        value = self._take(name)
        if type(value) is not float or not math.isfinite(value):
            raise self._refuse(name, value, "a finite float")
        return value

    def flag(self, name: str) -> bool:
        value = self._take(name)
        if type(value) is not bool:
            raise self._refuse(name, value, "true or false")
        return value

    def text(self, name: str, longest: int) -> str:
        value = self._take(name)
        if type(value) is not str or len(value) > longest:
            raise self._refuse(name, value, f"text of at most {longest} characters")
        return value

    def optional_text(self, name: str, longest: int) -> str | None:
        return None if self._absent(name) else self.text(name, longest)

    def binary(self, name: str, length: int) -> bytes:
        value = self._take(name)
        if type(value) is not bytes or len(value) != length:
            raise self._refuse(name, value, f"{length} bytes")
        return value

    def optional_binary(self, name: str, length: int) -> bytes | None:
        return None if self._absent(name) else self.binary(name, length)

    def choice(self, name: str, allowed: Collection[str]) -> str:
        value = self._take(name)
        if type(value) is not str or value not in allowed:
            raise self._refuse(name, value, f"one of {', '.join(sorted(allowed))}")
        return value

    def shape(self, name: str, max_rank: int) -> tuple[int, ...]:
        sizes = self._take(name)
        if type(sizes) is not list or not is_shape(sizes, max_rank):
            wanted = f"a list of at most {max_rank} integers of 0 or more whose product is below 2**62"
            raise self._refuse(name, sizes, wanted)
        return tuple(sizes)

    def empty_list(self, name: str) -> tuple[()]:
        value = self._take(name)
        if type(value) is not list or value:
            raise self._refuse(name, value, "an empty list: format version 1 stores every leaf whole")
        return ()

    def names(self, name: str, most: int, longest: int) -> tuple[str, ...]:
        entries = self._take(name)
        if type(entries) is not list or len(entries) > most or not _are_names(entries, longest):
            raise self._refuse(name, entries, f"a list of at most {most} names")
        return tuple(entries)

    def lists_of_names(self, name: str, most: int, longest: int) -> tuple[tuple[str, ...], ...]:
        entries = self._take(name)
        if type(entries) is not list or len(entries) > most:
            raise self._refuse(name, entries, f"a list of at most {most} lists of names")
        rows = Fields({str(index): entry for index, entry in enumerate(entries)}, f"{self._where}{name}.")
        return tuple(rows.names(str(index), most, longest) for index in range(len(entries)))

    def optional[T](self, name: str, read: Callable[[Fields], T]) -> T | None:
        return None if self._absent(name) else self._one(name, self._take(name), read)

    def each[T](self, name: str, most: int, read: Callable[[Fields], T]) -> tuple[T, ...]:
        entries = self._take(name)
        if type(entries) is not list:
            raise self._refuse(name, entries, "a list of maps")
        if len(entries) > most:
            raise InvalidManifest(f"{self._where}{name} has {len(entries)} entries; the limit is {most}")
        return tuple([self._one(f"{name}[{index}]", content, read) for index, content in enumerate(entries)])

    def _one[T](self, name: str, content: object, read: Callable[[Fields], T]) -> T:
        if type(content) is not dict:
            raise self._refuse(name, content, "a map")
        entry = Fields(content, f"{self._where}{name}.")
        value = read(entry)
        entry.finish()
        return value

    def scalars(self, name: str, most: int, longest: int, *kinds: type) -> Mapping[str, Scalar]:
        content = self._take(name)
        wanted = f"a map of at most {most} short names to {', '.join(kind.__name__ for kind in kinds)}"
        if type(content) is not dict or len(content) > most:
            raise self._refuse(name, content, wanted)
        for key, value in content.items():
            if not _are_names([key], longest) or type(value) not in kinds or not _is_plain(value, longest):
                raise self._refuse(f"{name}[{_clipped(key)}]", value, wanted)
        return content

    def tree(self, name: str, most: int) -> tuple[Any, ...]:
        """A tree description, see `residual_store.tree`."""
        nodes = self._take(name)
        if type(nodes) is not list:
            raise self._refuse(name, nodes, "a list of nodes")
        if len(nodes) > most:
            raise InvalidManifest(f"{self._where}{name} has {len(nodes)} nodes; the limit is {most}")
        check_tree(nodes, f"{self._where}{name}")
        return tuple(nodes)

    def _absent(self, name: str) -> bool:
        if self._rest.get(name, _MISSING) is None:
            del self._rest[name]
            return True
        return False


def is_shape(sizes: Sequence[Any], max_rank: int) -> bool:
    """Whether these are the sizes of an array, with a product that fits into a signed 64-bit integer."""
    if len(sizes) > max_rank:
        return False
    product = 1
    for size in sizes:
        if type(size) is not int or not 0 <= size < 1 << 62:
            return False
        product *= size or 1
    return product < 1 << 62


def _are_names(entries: list[Any], longest: int) -> bool:
    return all(type(entry) is str and len(entry) <= longest for entry in entries)


def _is_plain(value: Scalar, longest: int) -> bool:
    if type(value) is float:
        return math.isfinite(value)
    if type(value) is int:
        return -(1 << 63) <= value < 1 << 64
    return type(value) is not str or len(value) <= longest


def _clipped(value: object) -> str:
    if isinstance(value, list | dict | bytes | str):
        shown = ascii(value[:60] if not isinstance(value, dict) else dict(list(value.items())[:3]))
    else:
        shown = ascii(value)
    return shown if len(shown) <= 60 else shown[:57] + "..."
