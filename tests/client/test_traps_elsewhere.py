"""Other devices, other releases, and bytes from strangers."""

from __future__ import annotations

import json
import os
import pickle
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType
from jax.tree_util import tree_leaves

import residual_client as rc
from residual_store.errors import (
    DataLoss,
    MeshMismatch,
    ProgramMismatch,
    ProgramUnavailable,
    ResidualStoreError,
)
from tests.cases import CASES
from tests.cases.arguments import layer
from tests.cases.case import matrix, ramp
from tests.cases.sharded import mesh_of, spread
from tests.client.bits import bits_of

_REPOSITORY = Path(__file__).parents[2]


# Fewer devices

_ON_FOUR = ["shard_map_scalar_residual", "sharded_explicit_mesh", "sharded_replicated_leaf"]


@pytest.fixture(scope="module", params=[1, 2])
def on_fewer_devices(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[int, dict[str, dict[str, str]]]:
    """What a process with one or two devices says of bundles that were made on four."""
    url = f"file://{tmp_path_factory.mktemp('devices')}"
    with rc.connect(url) as client:
        for name in _ON_FOUR:
            client.offload(CASES[name]().forward()[1], f"devices/{name}").wait()
    environment = {**os.environ, "XLA_FLAGS": f"--xla_force_host_platform_device_count={request.param}"}
    command = [sys.executable, "-W", "error", "-m", "tests.client.few_devices_child", url, *_ON_FOUR]
    child = subprocess.run(command, cwd=_REPOSITORY, env=environment, stdout=subprocess.PIPE, check=True)
    return request.param, json.loads(child.stdout)


@pytest.mark.parametrize("name", _ON_FOUR)
def test_fewer_devices_are_refused_with_both_meshes_named(
    on_fewer_devices: tuple[int, dict[str, dict[str, str]]], name: str
) -> None:
    """The stored backward says on which mesh the bundle was made and what this process has; nothing hangs."""
    devices, said = on_fewer_devices
    error = said[name]["backward"]
    assert error.startswith("MeshMismatch: ")
    assert "mesh(i=4)" in error
    assert "4 devices" in error
    assert re.search(rf"this process has {devices}\b", error)


@pytest.mark.parametrize("name", _ON_FOUR)
def test_a_function_on_one_device_is_another_program(
    on_fewer_devices: tuple[int, dict[str, dict[str, str]]], name: str
) -> None:
    """What the same source gives without the mesh is refused by the key of the bundle."""
    _, said = on_fewer_devices
    assert re.match(f"(ProgramMismatch|MeshMismatch): .*'devices/{name}'", said[name]["like"])


def test_a_mesh_of_some_devices_needs_an_argument_on_it(client: rc.Client) -> None:
    """Nobody can guess which two of four devices are meant; an argument that lies on them says it."""
    mesh = jax.make_mesh((2,), ("i",), axis_types=(AxisType.Auto,), devices=jax.devices()[2:])
    w, x = spread(matrix(), mesh), spread(matrix(8, 4), mesh, "i")
    y, vjp = jax.vjp(layer, w, x, saveable_args=(False, True))
    handle = client.offload(vjp, "run/half")
    with pytest.raises(
        MeshMismatch, match=r"args\[1\] was made on mesh\(i=2\).*args or like that lie on the mesh"
    ):
        client.restore("run/half")
    wanted = jax.vjp(layer, w, x)[1](y)
    for restored in (client.restore(handle, args=(w, None)), client.restore("run/half", args=(w, None))):
        gradients = restored(y)
        assert bits_of(gradients) == bits_of(wanted)
        assert [g.sharding for g in gradients] == [g.sharding for g in wanted]


def test_shapes_with_their_shardings_describe_a_program(client: rc.Client) -> None:
    """A process that has no arrays yet may trace the forward with shapes, if they say how the arrays will lie."""
    forward = jax.jit(lambda w, x: jax.vjp(layer, w, x))
    args = CASES["sharded_replicated_leaf"]().args
    y, vjp = forward(*args)
    client.offload(vjp, "run/auto").wait()
    shapes = [jax.ShapeDtypeStruct(arg.shape, arg.dtype, sharding=arg.sharding) for arg in args]
    restored = rc.Client(client.store).restore("run/auto", like=jax.eval_shape(forward, *shapes)[1])
    assert bits_of(restored(y)) == bits_of(vjp(y))


def test_leaves_and_gradients_lie_where_they_did(client: rc.Client) -> None:
    """Without its sharding a gradient would land on one device without an error."""
    vjp = jax.jit(lambda a: jax.vjp(lambda a: jnp.sin(a) * a, a)[1])(spread(matrix(8, 2), mesh_of(4), "i"))
    handle = client.offload(vjp, "run/sharded")
    y_bar = spread(jnp.ones((8, 2)), mesh_of(4), "i")
    for source in (handle, "run/sharded"):
        restored = client.restore(source)
        for one, other in zip(tree_leaves(restored), tree_leaves(vjp), strict=True):
            assert one.sharding == other.sharding
        assert restored(y_bar)[0].sharding == vjp(y_bar)[0].sharding


def test_the_memory_kind_of_a_leaf_comes_back(client: rc.Client) -> None:
    """A residual that JAX itself had offloaded to pinned host memory lies there again."""
    vjp = CASES["vjp_remat_offload_pinned_host_jit"]().forward()[1]
    kinds = [leaf.sharding.memory_kind for leaf in tree_leaves(vjp)]
    assert "pinned_host" in kinds
    handle = client.offload(vjp, "run/pinned")
    handle.wait()
    assert [leaf.memory_kind for leaf in client.store.manifest("run/pinned").leaves] == kinds
    for source in (handle, "run/pinned"):
        restored = client.restore(source)
        assert [leaf.sharding.memory_kind for leaf in tree_leaves(restored)] == kinds


# Other releases


def test_another_release_of_jax_is_named(client: rc.Client) -> None:
    """A bundle of another release is refused where it is restored into a program of this one."""
    vjp = jax.vjp(layer, matrix(), ramp())[1]
    client.offload(vjp, "run/now").wait()
    bundle = client.store.get("run/now")
    versions = {**bundle.manifest.versions, "jax": "0.99.1"}
    older = replace(
        bundle, manifest=replace(bundle.manifest, key=None, versions=versions, fingerprint="0" * 64)
    )
    client.store.put("run/later", older)
    with pytest.raises(ProgramMismatch) as refusal:
        client.restore("run/later", like=vjp)
    assert f"the bundle was made with jax 0.99.1 and this is jax {jax.__version__}" in str(refusal.value)
    with pytest.raises(ProgramUnavailable, match="the program of 'run/later' is not in the store"):
        client.backward("run/later")


# Bytes from strangers


class Bomb:
    """A pickle that would make a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


def _stored_with_program(program: bytes, fn: Any = layer) -> rc.Client:
    """A client of a store in which somebody has put ``program`` under the fingerprint of a bundle's backward."""
    vjp = jax.vjp(fn, matrix(), ramp())[1]
    fingerprint = rc.connect("memory://").offload(vjp, "run/step").fingerprint
    client = rc.connect("memory://")
    client.store.put_program(str(fingerprint), program)
    client.offload(vjp, "run/step").wait()
    return client


def _program(fn: Any = layer) -> bytes:
    with rc.connect("memory://") as client:
        handle = client.offload(jax.vjp(fn, matrix(), ramp())[1], "run/step")
        handle.wait()
        return client.store.get_program(str(handle.fingerprint))


def test_a_pickle_is_never_loaded(tmp_path: Path) -> None:
    """A pickle in the place of a program is refused by its digest, and what is in it does not run."""
    bomb = pickle.dumps(Bomb(tmp_path / "exploded"))
    with pytest.raises(ProgramMismatch, match="'run/step'"):
        _stored_with_program(bomb).backward("run/step")
    assert not (tmp_path / "exploded").exists()
    pickle.loads(bomb)
    assert (tmp_path / "exploded").exists()


def test_no_package_can_load_code_from_data() -> None:
    """None of the packages uses pickle or one of its kin, or evaluates text."""
    folders = ("residual_store", "server/residual_server", "client/residual_client")
    forbidden = re.compile(
        r"\b(c?pickle|cloudpickle|dill|marshal|shelve|joblib)\b.*import|import\s+(c?pickle|cloudpickle|dill|marshal|shelve|joblib)\b"
        r"|allow_pickle\s*=\s*True|(?<![\w.])(eval|exec)\(|\b__reduce__\b"
    )
    sources = [path for folder in folders for path in (_REPOSITORY / folder).rglob("*.py")]
    assert len(sources) > 30
    assert [str(path) for path in sources if forbidden.search(path.read_text())] == []


@pytest.mark.parametrize("content", [b"", b"\0" * 64, b"not a program" * 100], ids=["empty", "zeros", "text"])
def test_a_program_that_is_none_is_refused(content: bytes) -> None:
    """What is not the program of the bundle is refused by its digest, before any reader sees it."""
    with pytest.raises(ProgramMismatch, match="'run/step' is not the one that the bundle was stored with"):
        _stored_with_program(content).backward("run/step")


def test_half_a_program_is_refused() -> None:
    """A truncated program is refused by name, wherever it was cut."""
    whole = _program()
    for length in range(1, len(whole) - 8, len(whole) // 7):
        with pytest.raises(ResidualStoreError, match="'run/step'"):
            _stored_with_program(whole[:length]).backward("run/step")


def test_a_program_with_a_damaged_byte_is_refused_or_right() -> None:
    """Whatever the byte, the answer is a refusal of ours or the right gradient, and never the end of the process."""
    child = subprocess.run(
        [sys.executable, "-m", "tests.client.damaged_child"],
        cwd=_REPOSITORY,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        timeout=150,
        check=False,
    )
    outcomes = [line.split(" ", 1) for line in child.stdout.splitlines()]
    assert [(position, what) for position, what in outcomes if what not in ("refused", "right")] == []
    assert child.returncode == 0, f"the process died after byte {outcomes[-1][0]}"
    assert len(outcomes) == 120


def test_a_program_that_is_damaged_on_disk_is_refused(tmp_path: Path) -> None:
    """One other bit in the stored program is found by its digest, before anything reads it."""
    with rc.connect(f"file://{tmp_path}") as client:
        handle = client.offload(jax.vjp(layer, matrix(), ramp())[1], "run/step")
        handle.wait()
        (stored,) = tmp_path.rglob(str(handle.fingerprint))
        content = bytearray(stored.read_bytes())
        content[len(content) // 2] ^= 1
        stored.write_bytes(content)
        with pytest.raises(DataLoss, match=str(handle.fingerprint)):
            rc.Client(client.store).backward("run/step")


def test_the_program_of_another_function_is_refused() -> None:
    """A program with the right shapes and another rule is not run, because its content does not give its name."""

    def scaled(scale: float) -> Any:
        rule = jax.custom_vjp(layer)
        rule.defvjp(lambda w, x: (layer(w, x), (w, x)), lambda saved, g: (saved[0] * scale, saved[1] + g))
        return rule

    client = _stored_with_program(_program(scaled(3.0)), scaled(2.0))
    with pytest.raises(
        ProgramMismatch,
        match="'run/step' is not the one that the bundle was stored with; it was neither read",
    ):
        client.backward("run/step")
