"""Every kind of VJP object comes back bit for bit: in this process, in another one, and without its source."""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import pytest
from jax.tree_util import tree_leaves, tree_structure

import residual_client as rc
from residual_store.errors import MeshMismatch, ProgramUnavailable
from residual_store.store import Store, open_store
from tests.cases import CASES
from tests.client.bits import bits_of
from tests.client.compilations import Compilations
from tests.client.direct import close, direct
from tests.client.parcels import packed, unpacked
from tests.client.restoring_child import key_of
from tests.servers import Server

_REPOSITORY = Path(__file__).parents[2]

each_case = pytest.mark.parametrize("name", CASES)
each_store = pytest.mark.parametrize("where", ["memory", "file", "http"])
each_shared_store = pytest.mark.parametrize("where", ["file", "http"])


def _skip_if_jax_cannot(name: str) -> None:
    if reason := CASES[name]().missing_on(jax.__version__):
        pytest.skip(reason)


@dataclass(frozen=True, kw_only=True)
class Shelf:
    """A store of each kind, and every case in each of them under its name."""

    stores: Mapping[str, Store]
    _kept: dict[tuple[str, str], tuple[rc.Client, rc.Handle]] = field(default_factory=dict)

    def shelved(self, name: str, where: str) -> tuple[rc.Client, rc.Handle]:
        """A client that has stored this case and nothing else, and the handle that it got."""
        if (name, where) not in self._kept:
            client, known = rc.Client(self.stores[where]), direct(name)
            with known.case.context():
                self._kept[name, where] = client, client.offload(known.vjp, key_of(name))
        return self._kept[name, where]


@pytest.fixture(scope="module")
def shelf(tmp_path_factory: pytest.TempPathFactory, memory_server: Server) -> Iterator[Shelf]:
    """The stores of this module."""
    root = tmp_path_factory.mktemp("conformance")
    urls = {"memory": "memory://", "file": f"file://{root}", "http": memory_server.url}
    made = Shelf(stores={where: open_store(url) for where, url in urls.items()})
    yield made
    for store in made.stores.values():
        store.close()


# In this process


@each_store
@each_case
def test_restored_in_the_same_process(name: str, where: str, shelf: Shelf) -> None:
    """By its handle, by its key and as scratch, a VJP object comes back with the same gradient, bit for bit."""
    _skip_if_jax_cannot(name)
    known = direct(name)
    client, handle = shelf.shelved(name, where)
    with known.case.context():
        scratch = client.offload(known.vjp)
        by_handle, by_key, by_scratch = (
            client.restore(source, args=known.case.args) for source in (handle, handle.key, scratch)
        )
        wanted = bits_of(known.eager)
        assert bits_of(by_handle(known.cotangent)) == wanted
        assert bits_of(by_key(known.cotangent)) == wanted
        assert tree_structure(by_scratch) == tree_structure(by_handle)
        assert bits_of(tree_leaves(by_scratch)) == bits_of(tree_leaves(by_handle))
    leaves = len(tree_leaves(known.vjp))
    assert scratch.wait().leaves == handle.wait().leaves == leaves
    assert known.case.leaves in (None, leaves)


@each_case
def test_backward_by_a_client_that_has_traced_nothing(name: str, shelf: Shelf) -> None:
    """The stored program gives the gradient of the jitted backward bit for bit, which is close to the eager one."""
    _skip_if_jax_cannot(name)
    known = direct(name)
    _, handle = shelf.shelved(name, "memory")
    stranger = rc.Client(shelf.stores["memory"])
    with known.case.context():
        if known.case.export_fails:
            assert known.case.export_fails in str(handle.wait().no_program)
            with pytest.raises(ProgramUnavailable, match=known.case.export_fails):
                stranger.backward(handle.key)
        elif known.case.on_some_devices:
            with pytest.raises(MeshMismatch, match=r"mesh\(i=2\) .* has 2 devices, and this process has 4"):
                stranger.backward(handle.key)
        else:
            assert handle.wait().no_program is None
            gradients = stranger.backward(handle.key)(known.cotangent, args=known.case.args)
            assert bits_of(gradients) == bits_of(known.jitted)
            assert close(gradients, known.eager)


# In other processes


@dataclass(kw_only=True)
class Elsewhere:
    """Two processes at work on what this one has stored, and what they report in the end."""

    urls: Mapping[str, str]
    folder: Path
    compilations: Compilations
    failures: dict[tuple[str, str], str] = field(default_factory=dict)
    children: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    def start(self, module: str, task: Mapping[str, Any]) -> None:
        """Start a child process, which has a hash seed of its own, as it would on another machine."""
        question, report = self.folder / f"{module}.task", self.folder / f"{module}.report"
        question.write_text(json.dumps(task))
        command = [sys.executable, "-W", "error", "-m", f"tests.client.{module}"]
        environment = {**os.environ, "PYTHONHASHSEED": "20", **self.compilations.environment_of(module)}
        with question.open("rb") as stdin, report.open("wb") as stdout:
            self.children[module] = subprocess.Popen(
                command, stdin=stdin, stdout=stdout, cwd=_REPOSITORY, env=environment
            )

    def store(self, shelf: Shelf, name: str, where: str) -> None:
        """Store a case for the children."""
        try:
            shelf.shelved(name, where)
        except Exception as error:  # noqa: BLE001 - the tests of this case show it, the others go on
            self.failures[name, where] = f"{type(error).__name__}: {error}"

    def report(self, module: str, name: str, where: str) -> Any:
        """What a child says of one case in one store: lines of bits, or the text of an error."""
        assert self.children[module].wait(170) == 0
        if failure := self.failures.get((name, where)):
            return failure
        return json.loads((self.folder / f"{module}.report").read_text())[name][self.urls[where]]


@pytest.fixture(scope="module", autouse=True)
def elsewhere(
    request: pytest.FixtureRequest, shelf: Shelf, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Elsewhere]:
    """Everything stored for other processes, and those processes started, so that they work while we test here."""
    wanted = {item.callspec.params["name"] for item in request.session.items if item.path == request.path}
    names = [name for name in CASES if name in wanted and not CASES[name]().missing_on(jax.__version__)]
    made = Elsewhere(
        urls={where: shelf.stores[where].url for where in ("file", "http")},
        folder=tmp_path_factory.mktemp("children"),
        compilations=Compilations(tmp_path_factory.mktemp("compilations")),
    )
    with made.compilations.kept():
        with ThreadPoolExecutor(2) as pool:
            # XLA compiles outside of the interpreter's lock; two programs over several devices must not run at once.
            list(pool.map(direct, [name for name in names if CASES[name]().needs_devices == 1]))
        for name in names:
            for where in made.urls:
                made.store(shelf, name, where)
    urls = list(made.urls.values())
    made.start("restoring_child", {"urls": urls, "names": names})
    made.start("source_free_child", {"urls": urls, "calls": {name: _call(name) for name in names}})
    # What lives as long as this module need not be walked by every collection.
    gc.freeze()
    yield made
    gc.unfreeze()
    for child in made.children.values():
        child.kill()
        child.wait()


def _call(name: str) -> dict[str, Any]:
    known = direct(name)
    return {
        "key": key_of(name),
        "x64": known.case.x64,
        "cotangent": packed(known.cotangent),
        "args": None if known.case.saveable_args is True else packed(known.case.args),
    }


@each_shared_store
@each_case
def test_restored_in_another_process(name: str, where: str, elsewhere: Elsewhere) -> None:
    """A process that traces the same function gets the same gradient, bit for bit, whatever its hash seed."""
    _skip_if_jax_cannot(name)
    assert elsewhere.report("restoring_child", name, where) == bits_of(direct(name).eager)


@each_shared_store
@each_case
def test_backward_in_a_process_without_the_model(name: str, where: str, elsewhere: Elsewhere) -> None:
    """A process that never saw the function runs the stored program, and its gradient is the jitted one bit for bit.

    What has no such program says why; a container of a custom type is a tuple there.
    """
    _skip_if_jax_cannot(name)
    known = direct(name)
    found = elsewhere.report("source_free_child", name, where)
    if known.case.export_fails:
        assert found.startswith("ProgramUnavailable: ")
        assert known.case.export_fails in found
    elif known.case.on_some_devices:
        assert found.startswith("MeshMismatch: ")
    else:
        with known.case.context():
            assert found == bits_of(unpacked(packed(known.jitted)))
