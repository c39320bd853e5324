"""The treemap: areas in proportion to sizes, the whole box filled, nothing overlapping, and well-formed SVG."""

from __future__ import annotations

import itertools
import math
from xml.etree import ElementTree

from hypothesis import given, strategies as st

from residual_client.treemap import Box, Part, squarified, svg

_SIZES = st.integers(1, 1 << 20)
"""What is less than a millionth of the largest is less than a pixel, and floats leave no exact place for it."""


@given(st.lists(_SIZES, min_size=1, max_size=40), st.integers(1, 2000), st.integers(1, 2000))
def test_the_boxes_share_the_whole_box(sizes: list[int], width: int, height: int) -> None:
    """Each has the area that its size is of the sum, lies within, and overlaps no other."""
    sizes.sort(reverse=True)
    boxes = squarified(sizes, Box(0, 0, width, height))
    slack = 1e-6 * max(width, height)
    for size, box in zip(sizes, boxes, strict=True):
        assert math.isclose(box.width * box.height, size / sum(sizes) * width * height, rel_tol=1e-6)
        assert -slack <= box.x <= box.x + box.width <= width + slack
        assert -slack <= box.y <= box.y + box.height <= height + slack
    for one, other in itertools.combinations(boxes, 2):
        across = min(one.x + one.width, other.x + other.width) - max(one.x, other.x)
        down = min(one.y + one.height, other.y + other.height) - max(one.y, other.y)
        assert min(across, down) <= slack


@given(st.lists(st.tuples(st.integers(0, 1 << 50), st.text(max_size=20)), max_size=20))
def test_the_picture_is_well_formed(named: list[tuple[int, str]]) -> None:
    """There is a rectangle and a title for each part that has a size, whatever its name."""
    printable = [(size, "".join(filter(str.isprintable, name))) for size, name in named]
    picture = svg([Part(size, name, name, "#abc") for size, name in printable], title="<all>")
    root = ElementTree.fromstring(picture)
    titles = sorted(one.text or "" for one in root.iter("{http://www.w3.org/2000/svg}title"))
    assert titles == sorted(name for size, name in printable if size > 0)


def test_boxes_are_near_to_square() -> None:
    """The example of the paper has no box that is longer than three times its width."""
    boxes = squarified([6, 6, 4, 3, 2, 2, 1], Box(0, 0, 6, 4))
    assert max(max(box.width / box.height, box.height / box.width) for box in boxes) < 3
