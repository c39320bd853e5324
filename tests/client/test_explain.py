"""Explain: what it says of a VJP object is what an offload then does, and what it says of the model is true."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec as P

import residual_client as rc
from tests.cases import CASES

_FILE = Path(__file__).name
_GENERATOR = np.random.default_rng(7)


def _values(*shape: int) -> Any:
    return jnp.asarray(_GENERATOR.standard_normal(shape), jnp.float32)


_CAPTURED = _values(32, 32)


def _layer(p: Any, x: Any) -> Any:
    h = jax.nn.relu(x.astype(jnp.bfloat16) @ p["cast"].astype(jnp.bfloat16))
    return jnp.sin((h @ _CAPTURED) @ p["w"])  # the line of the sine


_LINE = next(
    number
    for number, line in enumerate(Path(__file__).read_text().splitlines(), 1)
    if line.endswith("# the line of the sine")
)
_P, _X = {"cast": _values(16, 32), "w": _values(32, 8)}, _values(4, 16)


@jax.jit
def _forward(p: Any, x: Any) -> Any:
    return jax.vjp(_layer, p, x)


def _by_where(explanation: rc.Explanation) -> dict[str, Any]:
    return {one.where: one for one in explanation.leaves}


def test_without_the_forward_it_says_where_a_leaf_is_used_and_what_it_looks_like(client: rc.Client) -> None:
    """Arguments have their path; the captured weight, casts of arguments, masks and constants are told apart."""
    explanation = client.explain(_forward(_P, _X)[1])
    leaves = _by_where(explanation)
    assert leaves["args[0]['w']"].leaf.shape == (32, 8)
    (sine,) = [
        one for where, one in leaves.items() if re.fullmatch(rf"used by mul.* at {_FILE}:{_LINE}", where)
    ]
    assert (sine.origin.source, sine.leaf.shape) == (f"{__file__}:{_LINE}", (4, 8))
    notes = [one.note for one in explanation.leaves]
    assert notes.count("looks like a captured weight") == 1
    assert "looks like args[0]['cast'] as bfloat16" in notes
    assert "looks like args[1] as bfloat16" in notes
    assert "mask" in notes
    assert "constant" in notes
    (captured,) = [one for one in explanation.leaves if one.origin.kind == "captured"]
    assert captured.leaf.shape == _CAPTURED.shape
    assert explanation.advice[0] == (
        f"if leaf {captured.leaf.index} is a weight, pass it as an argument and mark it not saveable: 4.0 KiB per microbatch"
    )


@pytest.mark.parametrize("is_abstract", [False, True])
def test_with_the_forward_it_says_what_made_a_leaf(client: rc.Client, is_abstract: bool) -> None:
    """The trace tells the cosine of the sine, and knows without guessing what is captured and what is a cast."""
    forward = jax.eval_shape(_forward, _P, _X) if is_abstract else _forward(_P, _X)
    explanation = client.explain(
        forward[1], forward=_forward, args=jax.eval_shape(lambda *args: args, _P, _X)
    )
    leaves = _by_where(explanation)
    assert leaves[f"cos at {_FILE}:{_LINE}"].leaf.shape == (4, 8)
    assert leaves["args[0]['cast'] as bfloat16"].origin.kind == "copy"
    assert leaves["a value captured by the function"].leaf.shape == _CAPTURED.shape
    assert not any(one.origin.looks_like for one in explanation.leaves)
    assert explanation.is_abstract is is_abstract
    assert any(one.is_constant for one in explanation.leaves) is not is_abstract
    assert any(text.startswith("pass leaf") for text in explanation.advice)


def test_a_weight_under_shard_map_is_a_copy_of_its_argument(client: rc.Client) -> None:
    """Each device has a copy of a weight that is not split, and the explanation names the argument."""
    mesh = jax.make_mesh((4,), ("i",), axis_types=(AxisType.Auto,))
    layer = jax.shard_map(lambda w, x: jnp.sin(x @ w), mesh=mesh, in_specs=(P(), P("i")), out_specs=P("i"))

    def forward(w: Any, x: Any) -> Any:
        return jax.vjp(layer, w, x)

    w = _values(16, 8)
    explanation = client.explain(forward(w, _X)[1], forward=forward, args=(w, _X))
    copies = [one for one in explanation.leaves if one.origin.kind == "copy"]
    assert [one.where for one in copies] == ["a copy of args[0]"]


def test_a_weight_that_an_argument_could_be_is_not_taken_for_captured(client: rc.Client) -> None:
    """Both factors of a product depend on the arguments: neither looks captured, in remat and in scan as well."""

    def model(w: Any, x: Any) -> Any:
        h = jnp.tanh(x @ jnp.sin(w))
        h = jax.checkpoint(lambda h: jnp.tanh(h @ jnp.cos(w)))(h)
        return jax.lax.scan(lambda h, _: (jnp.tanh(h @ jnp.exp(w)), None), h, length=3)[0]

    explanation = client.explain(jax.vjp(model, _values(8, 8), _values(4, 8))[1])
    assert len(explanation.leaves) > 4
    assert [one.note for one in explanation.leaves if one.origin.looks_like] == []


def test_a_vjp_object_can_be_explained_while_it_is_traced(client: rc.Client) -> None:
    """Inside of jit there are no values, and the rest is known."""
    explained: list[rc.Explanation] = []

    @jax.jit
    def step(p: Any, x: Any) -> Any:
        y, f_vjp = jax.vjp(_layer, p, x, saveable_args=((False, False), True))
        explained.append(rc.explain(f_vjp))
        return f_vjp.replace(args_res=[p, x])(jnp.ones_like(y))

    step(_P, _X)
    (explanation,) = explained
    assert explanation.is_abstract
    assert explanation.restored == ("args[0]['w']",)
    outside = client.explain(jax.eval_shape(_forward, _P, _X)[1])
    assert explanation.sent == outside.sent - 32 * 8 * 4


def test_another_forward_is_refused(client: rc.Client) -> None:
    """What another function saves says nothing of this one."""
    f_vjp = _forward(_P, _X)[1]
    for forward in (lambda p, x: jax.vjp(lambda p, x: x @ p["cast"], p, x), lambda p, x: x):
        with pytest.raises(rc.errors.ProgramMismatch, match="no VJP object with such residuals"):
            client.explain(f_vjp, forward=forward, args=(_P, _X))


@pytest.mark.parametrize(
    "name",
    [
        "vjp_cumulative_product",
        "vjp_cond",
        "structured_residuals_cond",
        "dtype_bool_relu_dropout",
        "tree_odd_dict_keys",
        "tree_tied_weights",
        "shape_twelve_same_shape_leaves",
        "vjp_remat_with_a_closed_over_weight",
    ],
)
def test_it_counts_what_an_offload_saves(name: str, client: rc.Client) -> None:
    """Constants, masks and duplicates are exactly those of the receipt, and all three forms name every leaf."""
    case = CASES[name]()
    with case.context():
        f_vjp = case.forward()[1]
        explanation = client.explain(f_vjp)
        receipt = client.offload(f_vjp).wait()
    assert explanation.nbytes - explanation.sent == sum(receipt.saved_bytes.values())
    assert sum(total.sent for total in explanation.totals) == explanation.sent
    text, page = str(explanation), _Page(explanation)
    for one in explanation.leaves:
        assert f"\n {one.leaf.index} " in text
        assert one.where in page.cells


class _Page(HTMLParser):
    """The tags and the table cells of a page; every tag is closed in its turn."""

    def __init__(self, explanation: rc.Explanation) -> None:
        super().__init__()
        self.tags, self.cells, self._open = list[str](), list[str](), list[str]()
        self.feed(explanation._repr_html_())
        self.close()
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.tags.append(tag)
        self._open.append(tag)
        if tag == "td":
            self.cells.append("")

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        if "td" in self._open:
            self.cells[-1] += data


def test_names_cannot_inject_markup(client: rc.Client) -> None:
    """A key with tags, quotes or rich's brackets is shown as it is and is nothing else."""
    key = '<script>alert("1")</script>&\'[red]'
    explanation = client.explain(jax.vjp(lambda p: jnp.sin(p[key]) * p[key], {key: _values(40, 40)})[1])
    page = _Page(explanation)
    assert "script" not in page.tags
    assert f"args[0][{key!r}]" in page.cells
    assert key in str(explanation).replace("\\'", "'")
