"""Eager adjoints: the gradient is right whatever follows, the simulations overlap, and nothing is left over or hangs."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import residual_client as rc

_PAIR = {"power": jax.ShapeDtypeStruct((), np.float32), "forces": jax.ShapeDtypeStruct((2,), np.float32)}
_SCALAR = jax.ShapeDtypeStruct((), np.float32)


def _fields(x: Any) -> Any:
    """A simulation in plain numpy: two inputs, one of them integer, and three output elements."""
    field = np.sin(x["shape"]) * x["order"]
    return {"power": (field**2).sum(), "forces": np.stack([field[0] * field[1], field[2]])}


def _fields_adjoint(x: Any, y_bar: Any) -> Any:
    field, slope = np.sin(x["shape"]) * x["order"], np.cos(x["shape"]) * x["order"]
    one, two = y_bar["forces"]
    bar = 2 * field * y_bar["power"] + np.array([one * field[1], one * field[0], two])
    return {"shape": bar * slope, "order": None}


def _traced(x: Any) -> Any:
    """The same in JAX."""
    field = jnp.sin(x["shape"]) * x["order"]
    return {"power": (field**2).sum(), "forces": jnp.stack([field[0] * field[1], field[2]])}


_X = {"shape": jnp.array([0.3, 0.5, 0.7]), "order": jnp.int32(2)}


def _loss(simulate: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """A nonlinear function of all outputs."""

    def loss(x: Any) -> Any:
        y = simulate(x)
        return jnp.sin(y["power"]) * y["forces"][0] + jnp.exp(y["forces"][1])

    return loss


@pytest.fixture
def fields() -> Iterator[rc.EagerAdjoint]:
    with rc.eager_adjoint(_fields, _fields_adjoint, result_shape_dtypes=_PAIR) as simulation:
        yield simulation


def _assert_close(one: Any, other: Any) -> None:
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-6), one, other)


# The gradient


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_the_gradient_is_that_of_the_function(fields: rc.EagerAdjoint, wrap: Callable[[Any], Any]) -> None:
    """Trees in and out, an integer input, and a nonlinear function of several outputs after it."""
    kwargs = {"allow_int": True}
    value, bar = wrap(jax.value_and_grad(_loss(fields), **kwargs))(_X)
    wanted, wanted_bar = jax.value_and_grad(_loss(_traced), **kwargs)(_X)
    _assert_close((value, bar["shape"]), (wanted, wanted_bar["shape"]))
    assert bar["order"].dtype == jax.dtypes.float0
    assert fields.pending == 0


def test_it_can_be_mapped_scanned_and_rematerialized(fields: rc.EagerAdjoint) -> None:
    """vmap, scan, checkpoint and jacrev give the same gradients as the function in JAX."""
    shapes = jnp.linspace(0.1, 0.9, 12).reshape(4, 3)

    def total(simulate: Callable[[Any], Any], shapes: Any) -> Any:
        def step(carry: Any, shape: Any) -> Any:
            carry = carry + _loss(simulate)({"shape": shape * carry, "order": 2})
            return carry, carry

        return jax.lax.scan(step, 0.5, shapes)[0]

    def mapped(simulate: Callable[[Any], Any], shapes: Any) -> Any:
        loss = jax.checkpoint(lambda shape: _loss(simulate)({"shape": shape, "order": 2}))
        return jax.vmap(loss)(shapes).sum()

    def jacobian(simulate: Callable[[Any], Any], shapes: Any) -> Any:
        return jax.jacrev(lambda shape: simulate({"shape": shape, "order": 2})["forces"])(shapes[0])

    for function in (total, mapped):
        found = jax.jit(jax.grad(function, argnums=1), static_argnums=0)(fields, shapes)
        _assert_close(found, jax.grad(function, argnums=1)(_traced, shapes))
    _assert_close(jacobian(fields, shapes), jacobian(_traced, shapes))


def test_a_vjp_can_be_applied_again_and_after_its_adjoints_have_expired() -> None:
    """The backward runs the adjoint itself where the waiting ones are gone, so late is slow and never wrong."""
    wanted = jax.vjp(jnp.sin, 0.5)[1](3.0)
    for bounds, expired in (({"pending_seconds": 0.0}, 2), ({"max_pending": 1}, 1), ({}, 0)):
        with _sine(**bounds) as sine:
            _, first = jax.vjp(sine, 0.5)
            _, second = jax.vjp(sine, 0.7)
            _assert_close((first(3.0), first(3.0)), (wanted, wanted))
            assert sine.expired == expired
            _assert_close(second(2.0), jax.vjp(jnp.sin, 0.7)[1](2.0))


def _sine(
    f: Callable[[Any], Any] = np.sin,
    adjoint: Callable[[Any, Any], Any] = lambda x, y_bar: np.cos(x) * y_bar,
    **options: Any,
) -> rc.EagerAdjoint:
    return rc.eager_adjoint(f, adjoint, result_shape_dtypes=_SCALAR, **options)


# What runs, and when


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_the_function_and_its_adjoint_run_at_the_same_time(wrap: Callable[[Any], Any]) -> None:
    """Each waits at a barrier for the other, so one after the other would never end."""
    both = threading.Barrier(2, timeout=30)

    def f(x: Any) -> Any:
        both.wait()
        return np.sin(x)

    def adjoint(x: Any, y_bar: Any) -> Any:
        both.wait()
        return np.cos(x) * y_bar

    with _sine(f, adjoint) as sine:
        found = wrap(jax.value_and_grad(lambda x: jnp.exp(sine(x))))(0.5)
    _assert_close(found, jax.value_and_grad(lambda x: jnp.exp(jnp.sin(x)))(0.5))


def test_the_value_does_not_wait_for_the_adjoint() -> None:
    """The forward goes on while the adjoint still runs."""
    released = threading.Event()

    def adjoint(x: Any, y_bar: Any) -> Any:
        assert released.wait(30)
        return np.cos(x) * y_bar

    with _sine(adjoint=adjoint) as sine:
        y, f_vjp = jax.vjp(sine, 0.5)
        assert float(y) == np.sin(np.float32(0.5))
        assert sine.pending == 1
        released.set()
        _assert_close(f_vjp(1.0)[0], np.cos(0.5))


def test_without_a_gradient_no_adjoint_starts() -> None:
    """Neither an eager nor a jitted call runs the adjoint."""
    calls: list[Any] = []
    with _sine(adjoint=lambda *given: calls.append(given)) as sine:
        sine(0.5)
        jax.jit(sine)(0.5)
        jax.vmap(sine)(jnp.ones(3))
        assert (sine.pending, calls) == (0, [])


def test_what_is_not_finite_stays_where_the_adjoint_puts_it() -> None:
    """A sum of adjoints would spread one overflow over all inputs, or not, depending on what was in time."""
    x, y_bar = jnp.array([0.0, 0.3, 0.6, 0.9]), jnp.array([jnp.nan, 0.0, jnp.inf, 1.0])
    for most in (8, 0):
        with rc.eager_adjoint(
            np.sin, lambda x, y_bar: np.cos(x) * y_bar, result_shape_dtypes=lambda x: x, max_pending=most
        ) as sine:
            _, f_vjp = jax.vjp(sine, x)
            jax.vjp(sine, x + 1)
            np.testing.assert_allclose(f_vjp(y_bar)[0], jnp.cos(x) * y_bar, rtol=1e-6)


def test_an_adjoint_whose_backward_does_not_come_is_cancelled() -> None:
    """What has not started when its entry is dropped never starts."""
    released = threading.Event()
    calls: list[float] = []

    def adjoint(x: Any, y_bar: Any) -> Any:
        calls.append(float(x))
        assert released.wait(30)
        return np.cos(x) * y_bar

    class Separate(ThreadPoolExecutor):
        """Runs the function at once, and the adjoints one after the other."""

        def submit(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
            if function is adjoint:
                return super().submit(function, *args, **kwargs)
            done: Future[Any] = Future()
            done.set_result(function(*args, **kwargs))
            return done

    with Separate(1) as executor, _sine(adjoint=adjoint, executor=executor, max_pending=1) as sine:
        for x in (0.25, 0.5, 0.75):
            jax.vjp(sine, x)
        assert (sine.pending, sine.expired) == (1, 2)
        sine.close()
        released.set()
    assert calls == [0.25]


def test_calls_from_several_threads_do_not_mix() -> None:
    """Many gradients in flight at once are each that of its own input."""
    with _sine() as sine, ThreadPoolExecutor(8) as threads:
        gradient = jax.jit(jax.grad(lambda x: jnp.exp(sine(x))))
        points = jnp.linspace(0.0, 1.0, 40)
        found = list(threads.map(gradient, points))
        assert sine.pending == 0
    _assert_close(jnp.stack(found), jax.vmap(jax.grad(lambda x: jnp.exp(jnp.sin(x))))(points))


# Refusals and errors


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_an_error_of_the_simulator_comes_out_with_its_message(wrap: Callable[[Any], Any]) -> None:
    """Of the function, of the adjoint, and of a result of another shape or tree; nothing hangs."""

    def fails(*_: Any) -> Any:
        raise RuntimeError("the mesh has a hole at cell 7")

    def grad_of(simulation: rc.EagerAdjoint) -> Any:
        return wrap(jax.grad(lambda x: jnp.exp(simulation(x))))(0.5)

    for simulation, words in [
        (_sine(f=fails), "hole at cell 7"),
        (_sine(adjoint=fails), "hole at cell 7"),
        (_sine(f=lambda x: np.ones(3)), r"should be float32\[\]"),
        (_sine(adjoint=lambda x, y_bar: np.ones(3)), r"should be float32\[\]"),
        (_sine(adjoint=lambda x, y_bar: x * y_bar, f=lambda x: x.fill(0)), "read-only"),
        (_sine(f=lambda x: threading.Event().wait(2), timeout=0.1), r"no result in 0\.1 seconds"),
    ]:
        with simulation, pytest.raises(Exception, match=words):
            grad_of(simulation)


def test_what_would_cost_too_many_adjoints_is_refused() -> None:
    """The refusal counts them and says what to use; the value alone can still be had."""
    many = jax.ShapeDtypeStruct((17,), np.float32)
    with rc.eager_adjoint(
        lambda x: np.full(17, x), lambda x, y_bar: y_bar.sum(), result_shape_dtypes=many
    ) as simulation:
        assert simulation(2.0).sum() == 34
        with pytest.raises(rc.errors.InvalidOption, match=r"would run 17 adjoints.*value_and_grad"):
            jax.grad(lambda x: simulation(x).sum())(2.0)
        assert [float(one) for one in simulation.value_and_grad(jnp.sum)(2.0)] == [34, 17]
        with pytest.raises(rc.errors.InvalidOption, match="17 adjoints"):
            simulation.value_and_grad(lambda y: (y**2).sum())(2.0)
    with (
        rc.eager_adjoint(
            np.sign, np.sign, result_shape_dtypes=jax.ShapeDtypeStruct((), np.int32)
        ) as simulation,
        pytest.raises(rc.errors.InvalidOption, match="int32 and has no gradient"),
    ):
        simulation(1.0)


def test_a_gradient_in_a_complex_input_is_refused() -> None:
    """The value can be had, and a gradient that would leave the complex leaf out cannot."""
    x = {"real": jnp.ones(2), "wave": jnp.ones(2) * 1j}
    with rc.eager_adjoint(
        lambda x: np.abs(x["wave"]).sum(), lambda x, y_bar: x, result_shape_dtypes=_SCALAR
    ) as simulation:
        assert simulation(x) == 2
        with pytest.raises(rc.errors.InvalidOption, match=r"x\['wave'\] is complex64"):
            jax.grad(simulation)(x)


# The cotangent that is known before the primal

_WEIGHTS = jnp.arange(3.0)


@pytest.mark.parametrize(
    ("g", "wanted"),
    [
        (lambda y: y @ _WEIGHTS + 1, False),
        (lambda y: (3 * y).sum(), False),
        (lambda y: jax.jit(lambda y: y * jnp.cos(_WEIGHTS))(y).mean(), False),
        (lambda y: jax.lax.scan(lambda c, row: (c + row, None), 0.0, y * _WEIGHTS)[0], False),
        (lambda y: jnp.where(_WEIGHTS > 1, y, 0.0).sum(), False),
        (lambda y: (y * jnp.zeros_like(y) + y).sum(), False),
        (lambda y: jnp.sin(y).sum(), True),
        (lambda y: (y**2).sum(), True),
        (lambda y: jnp.max(y), True),
        (lambda y: y[jnp.argsort(_WEIGHTS * y)].sum(), True),
        (lambda y: y.sum() if y[0] > 0 else y[1], True),
        (lambda y: jax.lax.cond(y[0] > 0, jnp.sum, lambda y: y[1], y), True),
        (lambda y: jax.jit(lambda y: (y * y.sum()).sum())(y), True),
        (lambda y: jax.checkpoint(lambda y: jnp.sin(y).sum())(y), True),
        (lambda y: float(np.asarray(y)[0]) * y.sum(), True),
    ],
)
def test_a_cotangent_depends_on_the_primal(g: Callable[[Any], Any], wanted: bool) -> None:
    """Linear functions with constants do not; whatever reads a value of y does, branches of Python included."""
    y = jnp.array([0.2, 0.4, 0.9])
    assert rc.cotangent_depends_on_primal(g, y) is wanted
    assert rc.cotangent_depends_on_primal(g, jax.ShapeDtypeStruct((3,), np.float32)) is wanted


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_value_and_grad_runs_one_adjoint_with_the_real_cotangent(wrap: Callable[[Any], Any]) -> None:
    """Beside the function where the cotangent is known before; otherwise it takes the adjoints of all outputs."""
    both = threading.Barrier(2, timeout=30)
    cotangents: list[Any] = []

    def f(x: Any) -> Any:
        both.wait()
        return np.sin(x)

    def adjoint(x: Any, y_bar: Any) -> Any:
        both.wait()
        cotangents.append(np.array(y_bar))
        return np.cos(x) * y_bar

    x = jnp.array([0.2, 0.4, 0.9])
    with rc.eager_adjoint(f, adjoint, result_shape_dtypes=lambda x: x) as sine:
        found = wrap(sine.value_and_grad(lambda y: y @ _WEIGHTS))(x)
    _assert_close(found, jax.value_and_grad(lambda x: jnp.sin(x) @ _WEIGHTS)(x))
    assert np.array_equal(cotangents, [_WEIGHTS])

    with rc.eager_adjoint(
        np.sin, lambda x, y_bar: np.cos(x) * y_bar, result_shape_dtypes=lambda x: x
    ) as sine:
        found = wrap(sine.value_and_grad(lambda y: (y**2).sum()))(x)
    _assert_close(found, jax.value_and_grad(lambda x: (jnp.sin(x) ** 2).sum())(x))


def test_value_and_grad_sees_what_the_function_captures_at_the_call() -> None:
    """A captured value that has changed since the last call counts in the gradient as in the value."""
    scale = [2.0]
    with rc.eager_adjoint(lambda x: 3 * x, lambda x, y_bar: 3 * y_bar, result_shape_dtypes=_SCALAR) as triple:
        value_and_grad = triple.value_and_grad(lambda y: scale[0] * y)
        assert [float(one) for one in value_and_grad(1.0)] == [6, 6]
        scale[0] = 5.0
        assert [float(one) for one in value_and_grad(1.0)] == [15, 15]
