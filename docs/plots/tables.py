"""Tables of figures on a page, between marks that say which figures they show."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

__all__ = ["Json", "fill", "table"]

type Json = Any

_PLACE = re.compile(r"(<!-- figures: (?P<name>[\w-]+) -->\n).*?(<!-- end -->)", re.DOTALL)


def fill(page: str, tables: Mapping[str, Callable[[Json], str]], figures: Json) -> str:
    """The page with what stands between each pair of marks made anew from the figures."""
    return _PLACE.sub(lambda found: f"{found[1]}\n{tables[found['name']](figures)}\n\n{found[3]}", page)


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table, whose columns but the first are aligned to the right."""
    lines = [head, ["---", *["---:"] * (len(head) - 1)], *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
