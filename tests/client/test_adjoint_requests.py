"""Adjoint requests: another process computes the adjoints, its errors come back, and nothing stays in the store."""

from __future__ import annotations

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import residual_client as rc
from tests.servers import Server

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
