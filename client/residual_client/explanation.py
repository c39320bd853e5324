"""An explanation: what an offload of a VJP object would send and why, as text, as a rich table, and as HTML."""

from __future__ import annotations

import io
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from rich import box
from rich.console import Console, Group
from rich.markup import escape as plain
from rich.table import Column, Table

from residual_client.origins import Origin
from residual_client.treemap import Part, svg
from residual_store.leaf import Leaf
from residual_store.stat import saved_bytes
from residual_store.tables import in_units

__all__ = ["ExplainedLeaf", "Explanation", "Total"]

_COLOURS = {"argument": "#9ecae1", "captured": "#fdae6b", "copy": "#fdd0a2", "computed": "#a1d99b"}
_MEANINGS = {
    "argument": "argument",
    "captured": "captured, or looks like it",
    "copy": "copy of an argument, or looks like it",
    "computed": "computed by the forward",
}
_WORTH_SHARE, _WORTH_BYTES = 0.01, 1024
"""Advice is given for what is at least this share of all bytes that would be sent, and at least so many."""

_MOST_PARTS = 400
_WIDTH = 160
_HEADS = ("leaf", "channel", "origin", "dtype", "shape", "bytes", "sent", "note")


@dataclass(frozen=True, kw_only=True)
class ExplainedLeaf:
    """One residual: what it is (``leaf``, encoded as an offload would), and where it comes from.

    ``sent`` counts the bytes that an offload would send, and ``nbytes`` those of the array.
    """

    leaf: Leaf
    origin: Origin

    @property
    def nbytes(self) -> int:
        return self.leaf.array_nbytes

    @property
    def sent(self) -> int:
        return self.leaf.encoded_nbytes

    @property
    def duplicate_of(self) -> int | None:
        """The index of the earlier leaf that has the same bytes, if there is one."""
        return self.leaf.alias_of

    @property
    def is_shared(self) -> bool:
        """Whether the run that was asked holds it already, so that it is not sent again."""
        return self.leaf.is_shared

    @property
    def is_constant(self) -> bool:
        """Whether all elements are equal."""
        return self.leaf.encoding == "constant"

    @property
    def is_mask(self) -> bool:
        """Whether it holds booleans, which travel as bits."""
        return self.leaf.dtype == "bool"

    @property
    def where(self) -> str:
        """The path of an argument, or what is known of another leaf."""
        return self.leaf.path if self.leaf.channel == "args_res" else self.origin.text

    @property
    def group(self) -> str:
        """What it is counted with: the positional argument, or the origin."""
        return self.where.partition("]")[0] + "]" if self.leaf.channel == "args_res" else self.where

    @property
    def note(self) -> str:
        notes = [f"looks like {self.origin.looks_like}"] if self.origin.looks_like else []
        if self.duplicate_of is not None:
            notes.append(f"{'is' if self.leaf.same_array else 'equals'} leaf {self.duplicate_of}")
        notes += ["already in the run: not sent again"] * self.is_shared
        notes += [f"{self.leaf.tiles} equal shards"] * self.leaf.is_tiled
        notes += ["constant"] * self.is_constant + ["mask"] * self.is_mask
        return ", ".join(notes)


@dataclass(frozen=True, kw_only=True)
class Total:
    """The leaves of one origin and their bytes."""

    origin: str
    leaves: int
    nbytes: int
    sent: int


@dataclass(frozen=True, kw_only=True)
class Explanation:
    """What `explain` returns: print it, or let a notebook or rich show it.

    ``restored`` names the arguments that are not saved and must be given back.
    ``is_abstract`` says that there were no values, so constants and duplicates are not known.
    """

    function: str
    leaves: tuple[ExplainedLeaf, ...]
    restored: tuple[str, ...]
    is_abstract: bool

    @property
    def nbytes(self) -> int:
        """Bytes of all leaves as arrays."""
        return sum(one.nbytes for one in self.leaves)

    @property
    def sent(self) -> int:
        """Bytes that an offload would send, besides the manifest."""
        return sum(one.sent for one in self.leaves)

    @property
    def saved_bytes(self) -> dict[str, int]:
        """How many bytes would not be sent, by encoding, as the receipt of the offload has them."""
        return saved_bytes(one.leaf for one in self.leaves)

    @property
    def totals(self) -> tuple[Total, ...]:
        """One for each origin, the largest first."""
        groups = defaultdict[str, list[ExplainedLeaf]](list)
        for one in self.leaves:
            groups[one.group].append(one)
        totals = [
            Total(
                origin=origin,
                leaves=len(members),
                nbytes=sum(one.nbytes for one in members),
                sent=sum(one.sent for one in members),
            )
            for origin, members in groups.items()
        ]
        return tuple(sorted(totals, key=lambda total: -total.sent))

    @property
    def advice(self) -> tuple[str, ...]:
        """What would send less, the largest saving first."""
        savings = defaultdict[str, int](int)
        for one in self.leaves:
            if text := _advice(one):
                savings[text] += one.sent
        least = max(_WORTH_SHARE * self.sent, _WORTH_BYTES)
        worth = [(saved, text) for text, saved in savings.items() if saved >= least]
        return tuple(
            f"{text}: {in_units(saved)} per microbatch"
            for saved, text in sorted(worth, key=lambda pair: -pair[0])
        )

    @property
    def summary(self) -> str:
        """One line for all."""
        known = " (abstract: constants and duplicates are not known)" if self.is_abstract else ""
        shared = self.saved_bytes.get("shared", 0)
        again = f", {in_units(shared)} already in the run: not sent again" if shared else ""
        return (
            f"{self.function or 'a function'}: {len(self.leaves)} leaves, {in_units(self.nbytes)} as arrays, "
            f"{in_units(self.sent)} to send{again}{known}"
        )

    def __str__(self) -> str:
        text = io.StringIO()
        Console(file=text, width=_WIDTH, color_system=None).print(self.__rich__())
        return "\n".join(line.rstrip() for line in text.getvalue().splitlines())

    def __rich__(self) -> Group:
        parts: list[Any] = [
            plain(self.summary),
            _table(_HEADS, self._rows()),
            _table(_TOTAL_HEADS, self._sums()),
        ]
        if self.restored:
            parts.append(plain(f"to be given back at restore: {', '.join(self.restored)}"))
        parts += [plain(f"advice: {text}") for text in self.advice]
        return Group(*parts)

    def _repr_html_(self) -> str:
        notes = [f"to be given back at restore: {', '.join(self.restored)}"] if self.restored else []
        lines = "".join(f"<li>{escape(text)}</li>" for text in [*notes, *self.advice])
        legend = " ".join(
            f'<span style="background:{colour};padding:0 .5em">{escape(_MEANINGS[kind])}</span>'
            for kind, colour in _COLOURS.items()
        )
        return (
            f"<div><p>{escape(self.summary)}</p>{self.treemap()}<p>{legend}</p><ul>{lines}</ul>"
            f"{_html_table(_TOTAL_HEADS, self._sums())}{_html_table(_HEADS, self._rows())}</div>"
        )

    def treemap(self) -> str:
        """The bytes that would be sent as one SVG picture, a rectangle for each leaf."""
        largest = sorted(self.leaves, key=lambda one: -one.sent)
        parts = [_part(one) for one in largest[:_MOST_PARTS]]
        rest = sum(one.sent for one in largest[_MOST_PARTS:])
        parts.append(Part(rest, "others", f"{len(self.leaves) - _MOST_PARTS} smaller leaves", "#ddd"))
        return svg(parts, title=self.summary)

    def _rows(self) -> Iterator[Sequence[str]]:
        for one in self.leaves:
            leaf = one.leaf
            dtype = leaf.dtype if leaf.key_impl is None else f"{leaf.key_impl} keys"
            shape, sizes = str(list(leaf.shape)), map(in_units, (one.nbytes, one.sent))
            yield (str(leaf.index), leaf.channel, one.where, dtype, shape, *sizes, one.note)

    def _sums(self) -> Iterator[Sequence[str]]:
        for total in self.totals:
            yield (total.origin, str(total.leaves), in_units(total.nbytes), in_units(total.sent))


_TOTAL_HEADS = ("total of", "leaves", "bytes", "sent")
_LONG = {"origin", "note", "total of"}


def _advice(one: ExplainedLeaf) -> str | None:
    match one.origin.kind:
        case "argument":
            return f"if you still have {one.group} at the backward, mark it not saveable"
        case "captured" if one.leaf.shape:
            what = f"leaf {one.leaf.index}"
            if one.origin.looks_like:
                return f"if {what} is a weight, pass it as an argument and mark it not saveable"
            return f"pass {what}, which the function captures, as an argument and mark it not saveable"
        case "copy":
            looks, what = one.origin.looks_like, one.origin.text
            leaf = f"leaf {one.leaf.index} {'looks like' if looks else 'is'} {looks or what}"
            return f"{leaf}; make it before the call, pass it as the argument and mark it not saveable"
    return None


def _part(one: ExplainedLeaf) -> Part:
    size = in_units(one.sent)
    title = f"leaf {one.leaf.index}: {one.where}\n{one.leaf.dtype}{list(one.leaf.shape)}, {size}"
    return Part(one.sent, f"{one.where}\n{size}", f"{title}\n{one.note}".strip(), _COLOURS[one.origin.kind])


def _table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> Table:
    columns = [
        Column(name, overflow="fold", min_width=12) if name in _LONG else Column(name, no_wrap=True)
        for name in heads
    ]
    table = Table(*columns, box=box.SIMPLE_HEAD, pad_edge=False)
    for row in rows:
        table.add_row(*map(plain, row))
    return table


def _html_table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    head = "".join(f"<th>{escape(name)}</th>" for name in heads)
    body = "".join(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in rows)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
