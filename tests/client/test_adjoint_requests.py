"""Adjoint requests: another process computes the adjoints, its errors come back, and nothing stays in the store."""

from __future__ import annotations

import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import residual_client as rc
from tests.servers import Server, until
from tests.store.bundles import noise

_ROOT = Path(__file__).parents[2]


def _sine(client: rc.Client, key: str, **options: Any) -> rc.EagerAdjoint:
    return rc.eager_adjoint(
        lambda x: np.sin(x["at"]),
        None,
        result_shape_dtypes=lambda x: x["at"],
        client=client,
        key=key,
        **options,
    )


def _loss(sine: Any) -> Any:
    return lambda at: (sine({"at": at, "unit": 7}) ** 2).sum()


def _left(client: rc.Client, prefix: str) -> list[str]:
    return [entry.key for entry in client.store.list(prefix=prefix).entries]


def test_another_process_computes_the_adjoints(memory_server: Server) -> None:
    """Two workers share the requests of a jitted gradient; an error of theirs is raised here with its message."""
    key, at = "adjoints/sine", jnp.array([0.25, 0.5])
    command = [sys.executable, "-m", "tests.client.adjoint_worker", memory_server.url, key, "4"]
    workers = [
        subprocess.Popen(command, cwd=_ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    with rc.connect(memory_server.url) as client, _sine(client, key, timeout=60) as sine:
        gradient = jax.jit(jax.grad(_loss(sine)))
        for step in range(3):
            found = gradient(at + step)
            np.testing.assert_allclose(found, jnp.sin(2 * (at + step)), rtol=2e-6)
        with pytest.raises(Exception, match=r"no field at \[-1"):
            gradient(jnp.array([-1.0, -2.0]))
        reports = [worker.communicate(timeout=60) for worker in workers]
        assert sorted(int(out) for out, _ in reports) == [4, 4], reports
        sine.close()
        assert _left(client, f"{key}/") == []


def test_without_a_worker_nothing_hangs_and_nothing_stays(client: rc.Client) -> None:
    """The error names the request; requests whose backward does not come are taken back."""
    with _sine(client, "run/sine", timeout=0.1) as sine:
        with pytest.raises(Exception, match="nobody has answered 'run/sine/request/000000000000'"):
            jax.grad(_loss(sine))(jnp.array([0.5]))
        jax.vjp(_loss(sine), jnp.array([0.5]))
        assert _left(client, "run/") == [f"run/sine/request/{number:012}" for number in (1,)]
    assert _left(client, "run/") == []


def test_a_worker_passes_over_what_was_taken_back(client: rc.Client) -> None:
    """It serves what is left, and one that waits for another number finds what comes instead."""

    def serve() -> int:
        return rc.serve_adjoints(
            client,
            lambda x, y_bar: {"at": np.cos(x["at"]) * y_bar, "unit": None},
            "run/sine",
            most=1,
            idle_seconds=60,
        )

    at = jnp.array([0.75])
    with _sine(client, "run/sine", timeout=60, max_pending=1) as sine, ThreadPoolExecutor(1) as threads:
        jax.vjp(_loss(sine), at + 1)
        _, f_vjp = jax.vjp(_loss(sine), at)
        assert serve() == 1
        np.testing.assert_allclose(f_vjp(1.0)[0], jnp.sin(2 * at), rtol=2e-6)
        serving = threads.submit(serve)
        np.testing.assert_allclose(jax.grad(_loss(sine))(at), jnp.sin(2 * at), rtol=2e-6)
        assert serving.result(60) == 1


def _cosine(x: Any, y_bar: Any) -> Any:
    return {"at": np.cos(x["at"]) * y_bar, "unit": None}


def test_an_answer_that_comes_late_is_no_answer_to_another_question(client: rc.Client) -> None:
    """A process that starts anew asks under the same numbers; it gets its own gradients, and takes the next number where one is taken."""
    asked, answered = threading.Event(), threading.Event()

    def slow(x: Any, y_bar: Any) -> Any:
        asked.set()
        assert answered.wait(30)
        return _cosine(x, y_bar)

    at = jnp.array([0.25])
    with ThreadPoolExecutor(1) as threads:
        with _sine(client, "run/sine", timeout=60) as sine:
            serving = threads.submit(rc.serve_adjoints, client, slow, "run/sine", most=1)
            jax.vjp(_loss(sine), at)
            assert asked.wait(30)
        answered.set()
        assert serving.result(30) == 1
    jax.vjp(_loss(_sine(client, "run/sine")), at)
    assert [name.rpartition("/")[0] for name in _left(client, "run/")] == [
        "run/sine/answer",
        "run/sine/request",
    ]
    with _sine(client, "run/sine", timeout=60) as sine, ThreadPoolExecutor(1) as threads:
        gradient = threads.submit(jax.grad(_loss(sine)), at + 1)
        until(lambda: len(_left(client, "run/sine/request")) == 2)
        assert rc.serve_adjoints(client, _cosine, "run/sine", idle_seconds=1) == 2
        np.testing.assert_allclose(gradient.result(30), jnp.sin(2 * (at + 1)), rtol=2e-6)


def test_a_forward_elsewhere_takes_no_request_back_that_is_waited_for(client: rc.Client) -> None:
    """Nor does a close; the backward in another thread has its gradient as soon as a worker comes."""
    at = jnp.array([0.25])
    sine = _sine(client, "run/sine", timeout=60)
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(jax.grad(_loss(sine)), at)
        until(lambda: _left(client, "run/") and sine.pending == 0)
        jax.vjp(_loss(sine), at + 1)
        sine.close()
        assert rc.serve_adjoints(client, _cosine, "run/sine", most=0) == 0
        assert rc.serve_adjoints(client, _cosine, "run/sine", most=1) == 1
        np.testing.assert_allclose(waiting.result(30), jnp.sin(2 * at), rtol=2e-6)


def test_a_gradient_with_half_of_the_bits_is_refused(client: rc.Client) -> None:
    """As it comes from a worker whose JAX has 64-bit types off."""

    def cut(x: Any, y_bar: Any) -> Any:
        return {"at": (np.cos(x["at"]) * y_bar).astype(np.float32), "unit": None}

    with (
        jax.enable_x64(True),
        _sine(client, "run/sine", timeout=60) as sine,
        ThreadPoolExecutor(1) as threads,
    ):
        serving = threads.submit(rc.serve_adjoints, client, cut, "run/sine", most=1)
        with pytest.raises(
            Exception, match=r"\['at'\] is float32 and should be float64; switch jax_enable_x64 on"
        ):
            jax.grad(_loss(sine))(jnp.array([0.25]))
        assert serving.result(30) == 1


def test_a_gradient_that_cannot_be_sent_is_an_error_of_the_adjoint(client: rc.Client) -> None:
    """It is raised where it was asked for, and the worker goes on."""

    def long(x: Any, y_bar: Any) -> Any:
        return {"at": (np.cos(x["at"]) * y_bar).astype(np.longdouble), "unit": None}

    with _sine(client, "run/sine", timeout=60) as sine, ThreadPoolExecutor(1) as threads:
        serving = threads.submit(rc.serve_adjoints, client, long, "run/sine", most=1)
        with pytest.raises(Exception, match="JAX has no such dtype"):
            jax.grad(_loss(sine))(jnp.array([0.25]))
        assert serving.result(30) == 1


def test_what_is_no_request_is_named_and_left_alone(client: rc.Client) -> None:
    """A bundle of somebody else below the key is not taken for a request."""
    client.store.put("run/sine/request/000000000000", noise(8))
    with pytest.raises(
        rc.errors.InvalidOption, match="000' is no request for an adjoint; give the adjoints a key"
    ):
        rc.serve_adjoints(client, _cosine, "run/sine", idle_seconds=1)
    assert _left(client, "run/sine/") == ["run/sine/request/000000000000"]


def test_the_ways_to_ask_are_not_mixed(client: rc.Client) -> None:
    """An adjoint and a key to ask under exclude each other, and one of them is needed."""
    for adjoint, options in [
        (np.cos, {"client": client, "key": "run/a"}),
        (None, {}),
        (None, {"key": "run/a"}),
    ]:
        with pytest.raises(rc.errors.InvalidOption, match="an adjoint, or client and key"):
            rc.eager_adjoint(
                np.sin, adjoint, result_shape_dtypes=jax.ShapeDtypeStruct((), "float32"), **options
            )
