"""`Client.offloaded`: the gradient is that of the plain function wherever JAX allows it, memory falls, nothing stays behind."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
from jax.tree_util import tree_leaves, tree_structure

import residual_client as rc
from residual_store import open_store
from tests.cases import CASES
from tests.client.direct import close, direct
from tests.client.gates import Failing
from tests.servers import Server, running_server, until

type Function = Callable[..., Any]

# What a trace of the function itself cannot do, with or without a store, and what leaves tangents out.
_UNTRACEABLE = ("vjp_python_branch_positive", "vjp_python_branch_negative")
_PARTIAL = ("vjp_in_nzs", "vjp_in_nzs_all_zero")
_REFUSED = ("dtype_float6_e2m3fn", "dtype_float6_e3m2fn")
_OTHERS = [name for name in CASES if name not in (*_UNTRACEABLE, *_PARTIAL, *_REFUSED)]

W = jnp.linspace(-1, 1, 64).reshape(8, 8)
x = jnp.linspace(0, 1, 32).reshape(4, 8)


def layer(W: jax.Array, x: jax.Array) -> jax.Array:  # noqa: N803 - as in the formulas
    return jnp.tanh(x @ W) * jnp.cos(x)


def gradient(f: Function) -> Function:
    """The gradient of a loss over ``f``, in both arguments."""
    return jax.grad(lambda W, x: jnp.sum(f(W, x) ** 2), argnums=(0, 1))  # noqa: N803


def scanned(f: Function) -> Function:
    """Three layers of ``f`` with equal weights."""
    return lambda W, x: jax.lax.scan(lambda x, _: (f(W, x), None), x, None, length=3)[0]  # noqa: N803


def mapped(f: Function) -> Function:
    """``f`` over the rows of x."""
    return jax.vmap(f, (None, 0))


def chosen(f: Function) -> Function:
    """``f`` in one of two ways, by a value."""
    return lambda W, x: jax.lax.cond(  # noqa: N803
        x.ravel()[0] < 0.5, lambda: f(W, x), lambda: f(W * 2, x * x)
    )


def assert_equal(one: Any, other: Any) -> None:
    """Equal in structure, dtype and shape, and in values up to 1e-6 of the largest."""
    assert tree_structure(one) == tree_structure(other)
    for a, b in zip(tree_leaves(one), tree_leaves(other), strict=True):
        assert (a.dtype, a.shape) == (b.dtype, b.shape)
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-6 * float(np.max(np.abs(b), initial=0)))


def left_in(client: rc.Client) -> int:
    """How many bundles are in a store of which the client knows that it is its own."""
    return len(client.store.list(prefix="scratch/").entries) + client.depot.waiting


@pytest.fixture
def off(client: rc.Client) -> Function:
    """The layer with its residuals in a store and its weights outside."""
    return client.offloaded(layer, saveable_args=(False, True))


# The gradient


@pytest.mark.parametrize("name", _OTHERS)
def test_every_case_has_its_gradient(name: str, client: rc.Client) -> None:
    """Every function of the conformance suite has the gradient that it has without a store, and leaves nothing behind."""
    if reason := CASES[name]().missing_on(jax.__version__):
        pytest.skip(reason)
    known = direct(name)
    fn = known.case.fn if not known.case.has_aux else lambda *args: known.case.fn(*args)[0]
    stored = client.offloaded(fn, saveable_args=known.case.saveable_args)
    with known.case.context():
        gradients = jax.jit(lambda *args: jax.vjp(stored, *args)[1](known.cotangent))(*known.case.args)
        assert tree_structure(gradients) == tree_structure(known.jitted)
        for one, other in zip(tree_leaves(gradients), tree_leaves(known.jitted), strict=True):
            assert (one.dtype, one.shape) == (other.dtype, other.shape)
        assert close(gradients, known.jitted)
    assert left_in(client) == 0


_WITHIN: dict[str, tuple[Callable[[Function], Function], Any]] = {
    "grad": (gradient, x),
    "jit inside": (lambda f: gradient(jax.jit(f)), x),
    "scan": (lambda f: gradient(scanned(f)), x),
    "vmap of grad": (lambda f: mapped(gradient(f)), x),
    "grad of vmap": (lambda f: gradient(mapped(f)), x),
    "two vmaps": (lambda f: gradient(mapped(mapped(f))), x.reshape(2, 2, 8)),
    "scan of vmap": (lambda f: gradient(scanned(mapped(f))), x),
    "vmap of scan": (lambda f: gradient(mapped(scanned(f))), x),
    "jacobian": (lambda f: jax.jacrev(mapped(f), argnums=(0, 1)), x),
    "map": (lambda f: gradient(lambda *a: jax.lax.map(lambda row: f(a[0], row), a[1], batch_size=3)), x),
    "cond": (lambda f: gradient(scanned(chosen(f))), x),
    "vmap of cond": (lambda f: gradient(mapped(chosen(f))), x),
}


@pytest.mark.parametrize(
    ("name", "jit"), [*((name, True) for name in _WITHIN), ("grad", False), ("two vmaps", False)]
)
def test_it_works_within(name: str, jit: bool, off: Function, client: rc.Client) -> None:
    """Inside of other transformations the gradient is that of the plain function, and nothing stays in the store."""
    transform, values = _WITHIN[name]
    one, other = transform(off), transform(layer)
    if jit:
        one, other = jax.jit(one), jax.jit(other)
    assert_equal(one(W, values), other(W, values))
    assert left_in(client) == 0


def _twice(f: Function) -> Function:
    return lambda W, x: f(W, f(W, x))  # noqa: N803


@pytest.mark.parametrize("around", [jax.checkpoint, jax.jit, _twice])
def test_it_works_around(around: Callable[[Function], Function], off: Function, client: rc.Client) -> None:
    """Around `jax.checkpoint`, around `jax.jit`, and around a function that is offloaded itself."""
    inner = off if around is _twice else layer
    stored = client.offloaded(around(inner), saveable_args=(False, True))
    assert_equal(jax.jit(gradient(stored))(W, x), jax.jit(gradient(around(layer)))(W, x))
    assert left_in(client) == 0


def test_arguments_of_every_kind(client: rc.Client) -> None:
    """Static, integer, weak and key arguments, None, keywords, closed-over tracers, and several outputs."""

    def model(steps: int, p: Any, rows: Any, scale: Any, key: Any, *, bias: Any = None, s: Any) -> Any:
        h = jnp.take(p["w"], rows, axis=0).astype(jnp.bfloat16) * s
        for _ in range(steps):
            h = jnp.where(jax.random.bernoulli(key, 0.5, h.shape), jnp.tanh(h), 0) + (
                0 if bias is None else bias
            )
        return {"h": h, "rows": rows + 1}, jnp.sum(h.astype(jnp.float32) * scale)

    def loss(f: Function) -> Function:
        def run(p: Any, scale: Any, outer: Any) -> Any:
            def closed(p: Any, scale: Any) -> Any:
                return model(2, p, jnp.array([1, 2]), scale * outer, jax.random.key(0), s=0.5)

            first, total = f(closed)(p, scale)
            again = client.offloaded(model, static_argnums=0) if f is client.offloaded else model
            second, _ = again(1, p, np.array([0, 3]), 2.5, jax.random.key(1), s=scale)
            return total + jnp.sum((first["h"] + second["h"]).astype(jnp.float32))

        return jax.jit(jax.grad(run, argnums=(0, 1, 2)))

    arguments = {"w": W}, jnp.float32(2), jnp.float32(3)
    assert_equal(loss(client.offloaded)(*arguments), loss(lambda f: f)(*arguments))
    assert left_in(client) == 0


@pytest.mark.parametrize("scalar", [True, 3, 2.5, 1 + 3j, np.bool_(True)], ids=str)
@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_a_scalar_of_python_is_a_traced_value(wrap: Any, scalar: Any, client: rc.Client) -> None:
    """Also one that is itself what the backward reads."""

    def model(x: Any, s: Any) -> Any:
        return jnp.where(s == s, jnp.sin(x) * x, x) * jnp.real(s)

    def choice(x: Any, s: Any) -> Any:
        return jnp.where(s, jnp.sin(x) * x, x)

    for f in (model, choice):
        found = wrap(jax.grad(lambda x, f=f: client.offloaded(f)(x, scalar).sum()))(x)
        assert_equal(found, wrap(jax.grad(lambda x, f=f: f(x, scalar).sum()))(x))


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_a_residual_without_bytes_travels_as_nothing(wrap: Any, client: rc.Client) -> None:
    """float0, which XLA does not know."""

    @jax.custom_vjp
    def scaled(a: Any, i: Any) -> Any:
        return a * i

    def forward(a: Any, i: Any) -> Any:
        return a * i, (a, np.zeros((3,), jax.dtypes.float0))

    def backward(kept: Any, y_bar: Any) -> Any:
        assert (kept[1].dtype, kept[1].shape) == (jax.dtypes.float0, (3,))
        return y_bar * kept[0], None

    scaled.defvjp(forward, backward)
    found = wrap(jax.grad(lambda a: client.offloaded(scaled)(a, jnp.int32(3)).sum()))(x)
    np.testing.assert_array_equal(found, x)


@pytest.mark.parametrize(
    "kept", [jnp.full((2, 8), 2.0), np.zeros((2, 8), jax.dtypes.float0)], ids=["constant", "float0"]
)
def test_what_is_the_same_in_each_round_of_a_loop_is_stored_in_each(kept: Any, client: rc.Client) -> None:
    """A residual that depends on no argument, of which each backward takes its own."""

    @jax.custom_vjp
    def doubled(a: Any) -> Any:
        return a * 2

    doubled.defvjp(lambda a: (a * 2, kept), lambda kept, y_bar: (y_bar * 2,))
    off = client.offloaded(doubled)

    def loss(f: Any) -> Any:
        return lambda a: jax.lax.scan(lambda total, row: (total + f(row).sum(), None), 0.0, a)[0]

    rows = jnp.stack([x[:2], x[2:]])
    for wrap in (lambda f: f, jax.jit):
        np.testing.assert_array_equal(wrap(jax.grad(loss(off)))(rows), jnp.full_like(rows, 2))
    assert left_in(client) == 0


def test_one_function_differentiated_in_different_arguments(off: Function) -> None:
    """Derivatives of one jitted function in other arguments, taken in turn, do not mix up what they saved."""
    f = jax.jit(off)
    y, in_weights = jax.vjp(lambda weights: f(weights, x), W)
    _, in_values = jax.vjp(lambda values: f(W, values), x)
    _, in_both = jax.vjp(f, W, x)
    plain = jax.vjp(layer, W, x)[1](y)
    assert_equal(in_both(y), plain)
    assert_equal((*in_weights(y), *in_values(y)), plain)


def _half_mapped(f: Function) -> Function:
    """A layer whose second output does not depend on what is mapped, in a scan over both of its outputs."""

    def pair(a: Any, b: Any) -> Any:
        return jnp.sin(a) * b, jnp.cos(b)

    def loss(a: Any, b: Any) -> Any:
        one, other = jax.vmap(f(pair), (0, None))(a, b)
        again = jax.vmap(lambda a: jax.lax.scan(lambda c, _: (f(pair)(*c), None), (a, b), None, length=3)[0])
        return sum(jnp.sum(part**2) for part in (one, other, *again(a)))

    return jax.jit(jax.grad(loss, argnums=(0, 1)))


def test_an_output_that_vmap_does_not_map_counts_once_for_each_of_its_copies(client: rc.Client) -> None:
    """An argument that only one of several outputs takes from a batch has the gradient of the plain function."""
    assert_equal(
        _half_mapped(client.offloaded)(jnp.arange(4.0), jnp.float32(0.3)),
        _half_mapped(lambda f: f)(jnp.arange(4.0), jnp.float32(0.3)),
    )
    assert left_in(client) == 0


def test_outputs_keep_the_mesh_axis_that_vmap_maps_over(client: rc.Client) -> None:
    """With an explicit mesh, an output that only some operands of the batch reach lies on the mesh like the others."""

    def run(f: Function) -> Any:
        pair = jax.vmap(f(lambda W, x: (layer(W, x), W * 2)), (None, 0))  # noqa: N803
        return jax.jit(jax.grad(lambda *args: sum(jnp.sum(part**2) for part in pair(*args)), argnums=(0, 1)))

    with jax.set_mesh(jax.make_mesh((4,), ("i",), axis_types=(AxisType.Explicit,))):
        values = jax.device_put(x, P("i"))
        assert_equal(run(client.offloaded)(W, values), run(lambda f: f)(W, values))
    assert left_in(client) == 0


def test_an_empty_batch_stores_nothing(off: Function, client: rc.Client) -> None:
    """Over a batch of no element the gradient is that of the plain function, eagerly too."""
    for wrap in (jax.jit, lambda f: f):
        assert_equal(wrap(gradient(mapped(off)))(W, x[:0]), wrap(gradient(mapped(layer)))(W, x[:0]))
    assert left_in(client) == 0


def test_nothing_of_an_outer_trace_is_kept(client: rc.Client) -> None:
    """JAX's own check of leaked tracers finds none in a function that closes over what is being differentiated."""

    def loss(scale: Any) -> Any:
        return jnp.sum(client.offloaded(lambda x: jnp.sin(x * scale))(x))

    with jax.checking_leaks():
        jax.jit(jax.grad(loss))(2.0)


# Memory and bundles


def _loss(f: Function, *, scan: bool) -> Function:
    def unrolled(weights: Any, h: Any) -> Any:
        for one in weights:
            h = f(one, h)
        return h

    def rolled(weights: Any, h: Any) -> Any:
        return jax.lax.scan(lambda h, one: (f(one, h), None), h, weights)[0]

    run = rolled if scan else unrolled
    return jax.jit(jax.value_and_grad(lambda weights, h: jnp.sum(run(weights, h) ** 2), argnums=(0, 1)))


@pytest.mark.parametrize("scan", [False, True], ids=["unrolled", "scan"])
def test_a_deep_step_needs_a_fraction_of_the_memory(scan: bool, off: Function, client: rc.Client) -> None:
    """At 12 layers XLA plans at most 40 % of the plain step's temporaries, and the gradient is the same."""
    weights = 0.1 * jax.random.normal(jax.random.key(0), (12, 64, 64))
    h = jax.random.normal(jax.random.key(1), (1024, 64))
    plain, stored = (_loss(f, scan=scan).lower(weights, h).compile() for f in (layer, off))
    assert stored.memory_analysis().temp_size_in_bytes <= 0.4 * plain.memory_analysis().temp_size_in_bytes
    for _ in range(2):
        assert_equal(stored(weights, h), plain(weights, h))
        assert left_in(client) == 0


def test_over_http_through_segments_and_without(mapped_server: Server) -> None:
    """A server has the residuals between forward and backward, in shared memory or not, and nothing of them afterwards."""
    for share in (0, 1):
        settings = rc.Settings(share_segments=share, mapped_bytes=1)
        with rc.connect(mapped_server.url, settings=settings) as client:
            seen = []
            stored = client.offloaded(layer)

            def watched(W: Any, x: Any, stored: Function = stored, seen: list[Any] = seen) -> Any:  # noqa: N803
                y, backward = jax.vjp(stored, W, x)
                seen.extend(client.store.list(prefix="scratch/").entries)
                return backward(y)

            assert_equal(watched(W, x), jax.vjp(layer, W, x)[1](layer(W, x)))
            assert [stat.leaves for stat in seen] == [6]
            assert_equal(jax.jit(gradient(scanned(stored)))(W, x), jax.jit(gradient(scanned(layer)))(W, x))
            assert left_in(client) == 0


def test_a_forward_alone_stores_nothing(off: Function, client: rc.Client) -> None:
    """A call that nobody differentiates does not touch the store."""
    stored = jax.jit(off)(W, x), off(W, x), jax.jit(scanned(mapped(off)))(W, x)
    plain = jax.jit(layer)(W, x), layer(W, x), jax.jit(scanned(mapped(layer)))(W, x)
    assert_equal(stored, plain)
    assert left_in(client) == 0


def test_a_forward_without_its_backward_expires_and_is_counted() -> None:
    """Its bundle is gone when the lease ends, the client counts it, and a backward that comes too late is refused."""
    with rc.connect("memory://", settings=rc.Settings(scratch_ttl_seconds=0.2)) as client:
        y, backward = jax.vjp(client.offloaded(jnp.sin), x)
        assert client.depot.waiting == 1
        until(lambda: client.depot.expired == 1)
        assert left_in(client) == 0
        with pytest.raises(rc.errors.NotFound, match="their lease has ended"):
            backward(y)


def test_a_gradient_holds_no_memory_of_the_store() -> None:
    """Outside of jit too, where a residual may be a gradient itself: what is kept is a copy."""
    x = jnp.arange(1 << 18, dtype=jnp.float32)
    store = open_store("memory://", settings=rc.Settings(host_bytes=4 << 20))
    with rc.Client(store) as client:
        scaled = client.offloaded(lambda x, w: x * w, saveable_args=(True, False))
        kept = [jax.grad(lambda w, step=step: scaled(x + step, w).sum())(jnp.ones(())) for step in range(8)]
        rows = [jax.grad(lambda w, step=step: scaled(x + step, w).sum())(x) for step in range(8)]
        assert len(kept) == 8
        for step, row in enumerate(rows):
            np.testing.assert_array_equal(row, x + step)


def test_a_backward_that_cannot_be_served_now_can_be_tried_again(tmp_path: Path) -> None:
    """Its residuals are still there; and those that cannot be deleted now are gone with the client at the latest."""
    store = Failing(open_store(tmp_path.as_uri()))
    with rc.Client(store) as client:  # type: ignore[arg-type]
        y, backward = jax.jit(lambda x: jax.vjp(client.offloaded(jnp.sin), x))(x)
        apply = jax.jit(lambda f, y: f(y))
        store.broken = {"get"}
        with pytest.raises(jax.errors.JaxRuntimeError, match="Unreachable"):
            jax.block_until_ready(apply(backward, y))
        assert client.depot.waiting == 1
        store.broken = {"delete"}
        np.testing.assert_array_equal(apply(backward, y)[0], jnp.cos(x) * y)
        assert (client.depot.waiting, len(store.list(prefix="scratch/").entries)) == (0, 1)
        store.broken = set()
    with open_store(tmp_path.as_uri()) as left:
        assert left.list().entries == ()


def test_what_waits_is_deleted_with_the_client(tmp_path: Any) -> None:
    """A forward whose backward never ran leaves nothing in a store that outlives its client."""
    with rc.connect(f"file://{tmp_path}") as client:
        jax.vjp(client.offloaded(jnp.sin), x)
        assert len(client.store.list(prefix="scratch/").entries) == 1
    with rc.connect(f"file://{tmp_path}") as client:
        assert left_in(client) == 0


# Several devices


@pytest.fixture
def sharded() -> tuple[Any, Any, Any]:
    """A mesh of four devices, the weights on all of them, and the values split between them."""
    mesh = jax.make_mesh((4,), ("i",), axis_types=(AxisType.Auto,))
    return mesh, jax.device_put(W, NamedSharding(mesh, P())), jax.device_put(x, NamedSharding(mesh, P("i")))


@pytest.mark.parametrize("inner", [lambda f: f, scanned], ids=["plain", "scan"])
def test_sharded_arguments(inner: Function, off: Function, sharded: Any, client: rc.Client) -> None:
    """With arguments on four devices the gradient is right, with XLA's choice of shardings and under jax.shard_map."""
    mesh, weights, values = sharded
    expected = jax.jit(gradient(inner(layer)))(weights, values)
    assert_equal(jax.jit(gradient(inner(off)))(weights, values), expected)
    for check in (True, False):
        specs = {"in_specs": (P(), P("i")), "out_specs": P("i"), "check_vma": check}
        one, other = (gradient(jax.shard_map(inner(f), mesh=mesh, **specs)) for f in (off, layer))
        assert_equal(jax.jit(one)(weights, values), jax.jit(other)(weights, values))
    assert left_in(client) == 0


def test_each_device_has_residuals_of_its_own(sharded: Any, client: rc.Client) -> None:
    """Under jax.shard_map each device stores its part, though all weights are equal and its ticket looks like any other."""
    mesh, weights, values = sharded
    f = jax.shard_map(
        client.offloaded(layer), mesh=mesh, in_specs=(P(), P("i")), out_specs=P("i"), check_vma=True
    )
    y, backward = jax.vjp(f, weights, values)
    assert client.depot.waiting == 4
    assert_equal(backward(y), jax.vjp(layer, weights, values)[1](y))
    assert left_in(client) == 0


# Refusals


def test_checkpoint_around_it_says_to_turn_the_order_round(off: Function) -> None:
    """JAX refuses to run a host call twice, and the error says what to write instead."""
    with pytest.raises(NotImplementedError, match=re.escape("write client.offloaded(jax.checkpoint(f))")):
        jax.jit(gradient(jax.checkpoint(off)))(W, x)


def test_second_and_forward_derivatives_are_refused(off: Function) -> None:
    """A second derivative would miss what went through the store, so there is none, and no forward mode."""
    with pytest.raises(TypeError, match="once and in reverse mode only"):
        jax.jit(jax.grad(lambda x: jnp.sum(gradient(off)(W, x)[0] ** 2)))(x)
    with pytest.raises(TypeError, match="once and in reverse mode only"):
        jax.hessian(lambda x: jnp.sum(off(W, x)))(x)
    with pytest.raises(TypeError, match="forward-mode"):
        jax.jvp(off, (W, x), (W, x))


def test_a_second_backward_is_refused(off: Function) -> None:
    """The residuals are gone after the first, and the error says so."""
    y, backward = jax.vjp(off, W, x)
    backward(y)
    with pytest.raises(rc.errors.NotFound, match="a backward has taken them already"):
        backward(y)


def test_what_no_host_call_can_carry_is_refused(client: rc.Client, off: Function) -> None:
    """A float6 residual, a mutable reference, and a branch that depends on the element of a batch."""
    known = direct(_REFUSED[0])
    with pytest.raises(rc.errors.LeafUnavailable, match="float6_e2m3fn"):
        jax.vjp(client.offloaded(known.case.fn), *known.case.args)
    with pytest.raises(rc.errors.LeafUnavailable, match="mutable reference"):
        client.offloaded(lambda r: r[...])(jax.new_ref(x))
    with pytest.raises(NotImplementedError, match="vmap-of-cond"):
        jax.jit(mapped(gradient(chosen(off))))(W, x)


def test_a_backward_that_would_cut_its_residuals_to_32_bits_is_refused(client: rc.Client) -> None:
    """Where 64-bit types are on in the forward and off in the backward, the error says so."""
    for wrap in (jax.jit, lambda f: f):
        with jax.enable_x64(True):
            y, backward = wrap(lambda x: jax.vjp(client.offloaded(jnp.sin), x))(np.ones(3))
        with pytest.raises(rc.errors.PrecisionMismatch, match="float64, and jax_enable_x64 is off"):
            backward(y)


@pytest.mark.parametrize("saveable", [(True,), (True, (True, False))])
def test_flags_that_do_not_fit_the_arguments_are_refused(saveable: Any, client: rc.Client) -> None:
    """Flags for another number of arguments, or for parts of an argument that has none."""
    with pytest.raises(TypeError, match="saveable_args"):
        client.offloaded(layer, saveable_args=saveable)(W, x)


def test_a_branch_on_a_value_names_the_function(client: rc.Client) -> None:
    """An argument that should be static is refused by JAX, which says in which function of the caller."""

    def branching(x: Any, train: Any) -> Any:
        return jnp.sin(x) if train else x

    with pytest.raises(jax.errors.TracerBoolConversionError, match=r"branching at .*test_offloaded\.py"):
        client.offloaded(branching)(x, True)
    assert_equal(client.offloaded(branching, static_argnums=-1)(x, True), jnp.sin(x))


def test_a_full_store_is_named_in_the_error() -> None:
    """What the store raises comes out of the compiled step, with the key, the function and the leaf."""
    with rc.connect("memory://", settings=rc.Settings(host_bytes=64 << 10)) as client:
        step = jax.jit(gradient(client.offloaded(layer)))
        with pytest.raises(jax.errors.JaxRuntimeError, match=r"offloaded/0' of layer: args\[0\]"):
            jax.block_until_ready(step(W, jnp.ones((4096, 8))))
        jax.block_until_ready(step(W, x))
        assert left_in(client) == 0


def test_a_failure_on_one_of_several_devices_is_logged(
    sharded: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """The log names it, because XLA ends the process instead of raising if the other devices wait for that one."""
    mesh, weights, _ = sharded
    rows = jax.random.normal(jax.random.key(0), (4096, 8))
    with rc.connect("memory://", settings=rc.Settings(host_bytes=64 << 10)) as client:
        stored = client.offloaded(layer)
        specs = {"in_specs": (P(), P("i")), "out_specs": P("i")}
        step = jax.jit(jax.shard_map(lambda *args: jax.vjp(stored, *args)[0], mesh=mesh, **specs))
        with pytest.raises(jax.errors.JaxRuntimeError):
            jax.block_until_ready(step(weights, rows))
        # JAX keeps the failure of a device until its next step, and would raise it at the end of the program.
        jax.block_until_ready(step(weights, rows[:8]))
        assert re.search(r"StoreFull: 'scratch/\w+/offloaded/\d+' of layer", caplog.text)


def test_a_server_that_is_gone_is_named_in_the_error() -> None:
    """A step whose server has died between forward and backward fails, and does not hang."""
    settings = rc.Settings(connect_seconds=0.5, attempts=1)
    with running_server() as server, rc.connect(server.url, settings=settings) as client:
        y, backward = jax.jit(lambda x: jax.vjp(client.offloaded(jnp.sin), x))(x)
        jax.block_until_ready(y)
        server.process.kill()
        server.wait()
        with pytest.raises(jax.errors.JaxRuntimeError, match=r"(?s)Unreachable.*offloaded/0' of sin"):
            jax.block_until_ready(jax.jit(lambda f, y: f(y))(backward, y))
