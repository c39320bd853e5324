"""Fill docs/examples/README.md and draw its picture from a file that the example wrote.

    .venv/bin/python docs/examples/train.py --json figures.json
    .venv/bin/python docs/plots/live_bytes.py figures.json

It keeps the figures as docs/plots/live_bytes.json; a test compares the page and the picture with them.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from sawtooth import picture
from tables import Json, fill, table

__all__ = ["FIGURES", "PAGE", "PICTURE", "TABLES", "filled", "picture"]

_EXAMPLES = Path(__file__).parents[1] / "examples"
FIGURES = Path(__file__).with_name("live_bytes.json")
PAGE = _EXAMPLES / "README.md"
PICTURE = _EXAMPLES / "live-bytes.svg"


def filled(page: str, figures: Json) -> str:
    """The page with all tables between its marks made anew."""
    return fill(page, TABLES, figures)


def _losses(figures: Json) -> str:
    losses = figures["losses"]
    steps = range(len(next(iter(losses.values()))))
    shown = [step for step in steps if step in (0, 1, len(steps) - 1) or step % 5 == 4]
    rows = ([f"{step + 1}", *(f"{one[step]:.6f}" for one in losses.values())] for step in shown)
    return table(["step", *losses], rows)


def _differences(figures: Json) -> str:
    rows = (
        [name, "yes" if one["same_bits"] else "no", f"{one['losses']:.1e}", f"{one['gradients']:.1e}"]
        for name, one in figures["comparisons"].items()
    )
    return table(["", "same bits", "losses differ by", "gradients differ by"], rows)


def _sizes(figures: Json) -> str:
    seconds = figures["step_seconds"]
    most = {name: max(one) for name, one in (figures["live"] | figures["temporaries"]).items()}
    rows = (
        [name, "live arrays" if name in figures["live"] else "temporaries", _mib(size), _ms(seconds[name])]
        for name, size in sorted(most.items(), key=lambda one: list(seconds).index(one[0]))
    )
    return table(["", "what is measured", "most", "median step"], rows)


def _mib(size: float) -> str:
    return f"{size / 2**20:.1f} MiB"


def _ms(seconds: float) -> str:
    return f"{seconds * 1000:.0f} ms"


TABLES = {"losses": _losses, "differences": _differences, "sizes": _sizes}


def main(source: Path) -> None:
    """Take over the figures in ``source``."""
    figures = json.loads(source.read_text())
    FIGURES.write_text(json.dumps(figures, indent=2) + "\n")
    PAGE.write_text(filled(PAGE.read_text(), figures))
    PICTURE.write_text(picture(figures))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
