"""Reading a msgpack map that may be hostile, field by field.

Each reader names the place, such as ``leaves[3].shape``, in the error that it raises.
What no reader asked for is refused at the end, so a misspelt or smuggled field does not pass.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from typing import Any

import msgpack

from residual_store.errors import InvalidManifest
from residual_store.settings import Settings

__all__ = ["Fields", "unpack"]

type Scalar = Any


def unpack(data: bytes | memoryview, settings: Settings) -> Fields:
    """The one map in ``data``; raises `InvalidManifest` for anything else.

    Duplicate keys are refused here because msgpack lets the last one win silently.
    """
    try:
        content = msgpack.unpackb(
            data,
            raw=False,
            strict_map_key=True,
            object_pairs_hook=_distinct,
            max_str_len=max(settings.max_path_chars, settings.max_user_chars) * 4,
            max_bin_len=settings.max_path_chars * 4,
            max_array_len=settings.max_tree_nodes,
            max_map_len=settings.max_tree_nodes,
            max_ext_len=0,
        )
    except InvalidManifest:
        raise
    except Exception as error:  # noqa: BLE001 - msgpack raises a dozen unrelated types on hostile input
        raise InvalidManifest(
            f"the manifest is not one msgpack map: {type(error).__name__}: {str(error)[:100]}"
        ) from None
    if not isinstance(content, dict):
        raise InvalidManifest(f"the manifest is a msgpack {type(content).__name__}; it must be a map")
    return Fields(content, "")


def _distinct(pairs: list[tuple[Any, Any]]) -> dict[Any, Any]:
    content = dict(pairs)
    if len(content) != len(pairs):
        raise InvalidManifest("a map of the manifest has a key twice")
    return content


class Fields:
    """One map being read; ``where`` is its place in the manifest."""

    def __init__(self, content: dict[str, Any], where: str) -> None:
        self._rest = content
        self._where = where

    def _refuse(self, name: str, value: object, wanted: str) -> InvalidManifest:
        shown = ascii(value)
        shown = shown if len(shown) <= 60 else shown[:57] + "..."
        return InvalidManifest(f"{self._where}{name} is {shown}; it must be {wanted}")

    def _take(self, name: str, *kinds: type, wanted: str) -> Any:
        if name not in self._rest:
            raise InvalidManifest(f"{self._where}{name} is missing; it must be {wanted}")
        value = self._rest.pop(name)
        # type() and not isinstance(): True must not pass for the integer 1.
        if type(value) not in kinds:
            raise self._refuse(name, value, wanted)
        return value

    def finish(self) -> None:
        """Raise `InvalidManifest` if a field is left that no reader asked for."""
        if self._rest:
            unknown = ascii(min(self._rest, key=str))
            raise InvalidManifest(f"{self._where or 'the manifest'} has the unknown field {unknown[:60]}")

    def integer(self, name: str, low: int, high: int) -> int:
        wanted = f"an integer from {low} to {high}"
        value: int = self._take(name, int, wanted=wanted)
        if not low <= value <= high:
            raise self._refuse(name, value, wanted)
        return value

    def optional_integer(self, name: str, low: int, high: int) -> int | None:
        return None if self._absent(name) else self.integer(name, low, high)

    def number(self, name: str) -> float:
        value: float = self._take(name, float, wanted="a finite float")
        if not math.isfinite(value):
            raise self._refuse(name, value, "a finite float")
        return value

    def flag(self, name: str) -> bool:
        value: bool = self._take(name, bool, wanted="true or false")
        return value

    def text(self, name: str, longest: int) -> str:
        wanted = f"text of at most {longest} characters"
        value: str = self._take(name, str, wanted=wanted)
        if len(value) > longest:
            raise self._refuse(name, value, wanted)
        return value

    def optional_text(self, name: str, longest: int) -> str | None:
        return None if self._absent(name) else self.text(name, longest)

    def binary(self, name: str, length: int) -> bytes:
        value: bytes = self._take(name, bytes, wanted=f"{length} bytes")
        if len(value) != length:
            raise self._refuse(name, value, f"{length} bytes")
        return value

    def optional_binary(self, name: str, length: int) -> bytes | None:
        return None if self._absent(name) else self.binary(name, length)

    def choice(self, name: str, allowed: Collection[str]) -> str:
        wanted = f"one of {', '.join(sorted(allowed))}"
        value: str = self._take(name, str, wanted=wanted)
        if value not in allowed:
            raise self._refuse(name, value, wanted)
        return value

    def shape(self, name: str, max_rank: int) -> tuple[int, ...]:
        wanted = f"a list of at most {max_rank} integers of 0 or more whose product is below 2**62"
        sizes = self._take(name, list, wanted=wanted)
        product = 1
        for size in sizes:
            product *= max(size, 1) if type(size) is int and size >= 0 else 1 << 62
        if len(sizes) > max_rank or product >= 1 << 62:
            raise self._refuse(name, sizes, wanted)
        return tuple(sizes)

    def empty_list(self, name: str) -> tuple[()]:
        if self._take(name, list, wanted="an empty list"):
            raise InvalidManifest(
                f"{self._where}{name} is not empty; format version 1 stores every leaf whole"
            )
        return ()

    def names(self, name: str, most: int, longest: int) -> tuple[str, ...]:
        wanted = f"a list of at most {most} names"
        entries = self._take(name, list, wanted=wanted)
        if len(entries) > most or any(type(entry) is not str or len(entry) > longest for entry in entries):
            raise self._refuse(name, entries, wanted)
        return tuple(entries)

    def lists_of_names(self, name: str, most: int, longest: int) -> tuple[tuple[str, ...], ...]:
        wanted = f"a list of at most {most} lists of names"
        entries = self._take(name, list, wanted=wanted)
        if len(entries) > most or any(type(entry) is not list for entry in entries):
            raise self._refuse(name, entries, wanted)
        rows = Fields({str(index): entry for index, entry in enumerate(entries)}, f"{self._where}{name}.")
        return tuple(rows.names(str(index), most, longest) for index in range(len(entries)))

    def optional[T](self, name: str, read: Callable[[Fields], T]) -> T | None:
        if self._absent(name):
            return None
        return self._one(name, self._take(name, dict, wanted="a map"), read)

    def each[T](self, name: str, most: int, read: Callable[[Fields], T]) -> tuple[T, ...]:
        wanted = f"a list of at most {most} maps"
        entries = self._take(name, list, wanted=wanted)
        if len(entries) > most:
            raise InvalidManifest(f"{self._where}{name} has {len(entries)} entries; it must be {wanted}")
        return tuple(self._one(f"{name}[{index}]", content, read) for index, content in enumerate(entries))

    def _one[T](self, name: str, content: object, read: Callable[[Fields], T]) -> T:
        if type(content) is not dict:
            raise self._refuse(name, content, "a map")
        entry = Fields(content, f"{self._where}{name}.")
        value = read(entry)
        entry.finish()
        return value

    def scalars(self, name: str, most: int, longest: int, *kinds: type) -> Mapping[str, Scalar]:
        wanted = f"a map of at most {most} short names to {', '.join(kind.__name__ for kind in kinds)}"
        content: dict[str, Scalar] = self._take(name, dict, wanted=wanted)
        for key, value in content.items():
            short = (
                type(key) is str and len(key) <= longest and (type(value) is not str or len(value) <= longest)
            )
            if type(value) not in kinds or not short or (type(value) is float and not math.isfinite(value)):
                raise self._refuse(f"{name}[{ascii(key)[:40]}]", value, wanted)
        if len(content) > most:
            raise self._refuse(name, content, wanted)
        return content

    def tree(self, name: str, most: int) -> tuple[Any, ...]:
        """A tree description: a flat list of nodes, each a list that starts with the name of its kind."""
        nodes = self._take(name, list, wanted="a list of nodes")
        if len(nodes) > most:
            raise InvalidManifest(f"{self._where}{name} has {len(nodes)} nodes; the limit is {most}")
        for index, node in enumerate(nodes):
            if type(node) is not list or not node or type(node[0]) is not str:
                raise self._refuse(f"{name}[{index}]", node, "a list that starts with a node kind")
        return tuple(nodes)

    def _absent(self, name: str) -> bool:
        if name in self._rest and self._rest[name] is None:
            del self._rest[name]
            return True
        return False
