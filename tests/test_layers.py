"""The layers: what each package imports, how long its modules are, and what works without an extra."""

from __future__ import annotations

import ast
import importlib
import os
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = {
    "residual_store": ROOT / "residual_store",
    "residual_server": ROOT / "server" / "residual_server",
    "residual_client": ROOT / "client" / "residual_client",
}
MODULES = sorted(path for folder in PACKAGES.values() for path in folder.rglob("*.py"))
TESTS = sorted((ROOT / "tests").rglob("*.py"))


def _name(path: Path) -> str:
    return str(path.relative_to(ROOT))


@cache
def _imports(path: Path) -> frozenset[str]:
    """All modules that a file imports anywhere, as dotted names; for ``from a import b`` both a and a.b."""
    found = set[str]()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{_name(path)} has a relative import"
            found |= {str(node.module)} | {f"{node.module}.{alias.name}" for alias in node.names}
    return frozenset(found)


def _importers(*names: str) -> Iterator[str]:
    """Files that import one of these modules or something below one."""
    for path in MODULES:
        if any(found == name or found.startswith(f"{name}.") for found in _imports(path) for name in names):
            yield _name(path)


def test_the_inner_package_imports_no_outer_one() -> None:
    """The format and the engine know neither JAX nor a web framework nor the packages built on them."""
    outside = (
        "jax",
        "jaxlib",
        "fastapi",
        "starlette",
        "uvicorn",
        "prometheus_client",
        "residual_server",
        "residual_client",
    )
    assert [path for path in _importers(*outside) if path.startswith("residual_store/")] == []


def test_the_outer_packages_do_not_import_each_other() -> None:
    """A server has no JAX and no client, a client no web framework and no server."""
    assert [
        path for path in _importers("jax", "jaxlib", "residual_client") if path.startswith("server/")
    ] == []
    assert [
        path
        for path in _importers("fastapi", "starlette", "uvicorn", "residual_server")
        if path.startswith("client/")
    ] == []


@pytest.mark.parametrize(
    ("module", "homes"),
    [
        ("http.client", ["residual_store/http_store.py"]),
        ("jax._src", ["client/residual_client/jax_compat.py"]),
        ("jaxlib", ["client/residual_client/jax_compat.py"]),
        ("sqlite3", ["residual_store/engine/index_file.py"]),
    ],
)
def test_one_module_knows_a_library(module: str, homes: list[str]) -> None:
    """What may change under us is imported in one place, so that one place changes."""
    assert set(_importers(module)) <= set(homes)
    if module in {"http.client", "sqlite3"}:
        assert list(_importers(module)) == homes


def test_only_the_engine_knows_tensorstore() -> None:
    """Nothing above the engine opens a database."""
    found = list(_importers("tensorstore"))
    assert found
    assert [path for path in found if not path.startswith("residual_store/engine/")] == []


def test_nothing_pickles() -> None:
    """No module of ours imports what runs code while it reads data, and none asks numpy to."""
    assert list(_importers("pickle", "cloudpickle", "dill", "marshal", "shelve")) == []
    assert [_name(path) for path in MODULES if "allow_pickle=True" in path.read_text()] == []


@pytest.mark.parametrize("path", MODULES, ids=_name)
def test_no_generator_translates_errors(path: Path) -> None:
    """It would keep the memory of a bundle in a cycle; `residual_store.translation` has the reason, and what to use."""
    generators = [
        node
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and any("contextmanager" in ast.unparse(one) for one in node.decorator_list)
    ]
    handlers = [node for one in generators for node in ast.walk(one) if isinstance(node, ast.ExceptHandler)]
    raised = [node for one in handlers for node in ast.walk(one) if isinstance(node, ast.Raise) and node.exc]
    assert not raised, f"line {raised[0].lineno}"


@pytest.mark.parametrize("path", MODULES, ids=_name)
def test_a_module_is_short_and_named_for_what_it_is(path: Path) -> None:
    """Under 300 lines, with a docstring, a future import and no name that could mean anything."""
    text = path.read_text()
    assert len(text.splitlines()) < 300
    assert ast.get_docstring(ast.parse(text))
    assert path.stem not in {
        "utils",
        "util",
        "helpers",
        "helper",
        "common",
        "manager",
        "misc",
        "base",
        "core",
    }


@pytest.mark.parametrize(
    "path",
    [path for path in TESTS if path.name.startswith("test_") or path.name.startswith("contract")],
    ids=_name,
)
def test_every_test_says_what_it_shows(path: Path) -> None:
    """Each test has a docstring, is annotated, and neither sleeps nor mocks."""
    tree = ast.parse(path.read_text())
    assert not {"unittest.mock", "unittest", "mock"} & _imports(path)
    assert "sleep(" not in path.read_text() or path == Path(__file__)
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test_"):
            assert ast.get_docstring(node), f"{_name(path)}: {node.name} has no docstring"
            assert node.returns is not None, f"{_name(path)}: {node.name} is not annotated"


# What a process loads

_LOADED = "import sys; import {}; print(*sorted({{name.partition('.')[0] for name in sys.modules}}))"


def _loaded_by(module: str) -> set[str]:
    done = subprocess.run(
        [sys.executable, "-c", _LOADED.format(module)], capture_output=True, text=True, check=True
    )
    return set(done.stdout.split())


def test_a_process_loads_what_it_uses() -> None:
    """Importing one package loads neither the other outer one nor its dependencies."""
    store, server, client = (_loaded_by(name) for name in PACKAGES)
    assert not store & {"jax", "fastapi", "uvicorn", "tensorstore", "residual_server", "residual_client"}
    assert not server & {"jax", "jaxlib", "residual_client"}
    assert not client & {"fastapi", "uvicorn", "tensorstore", "residual_server"}
    assert {"fastapi", "residual_store"} <= server
    assert {"jax", "residual_store"} <= client


# What an environment has

_UV = ROOT / ".tools" / "bin" / "uv"

_SERVER_ONLY = """
import importlib.util, numpy as np
assert not importlib.util.find_spec("jax")
from residual_server import create_app
from residual_store import Bundle, Settings, errors, open_store
from residual_store.engine.local import LocalStore
assert create_app(LocalStore.in_memory(settings=Settings())).title
with open_store("memory://") as store:
    store.put("run/a", Bundle.of_arrays({"h": np.arange(3)}))
    assert store.get("run/a").array(0)[2] == 2
try:
    import residual_client
except errors.MissingExtra as error:
    print(error)
"""

_CLIENT_ONLY = """
import importlib.util
assert not importlib.util.find_spec("fastapi")
import jax, jax.numpy as jnp, residual_client
from residual_store import errors
y, f_vjp = jax.vjp(lambda x: jnp.sin(x) * x, jnp.arange(3.0))
client = residual_client.connect("memory://")
handle = client.offload(f_vjp)
handle.wait()
assert (client.restore(handle)(y)[0] == f_vjp(y)[0]).all()
client.close()
try:
    import residual_server
except errors.MissingExtra as error:
    print(error)
"""


@pytest.mark.parametrize(
    ("extra", "script", "other"), [("server", _SERVER_ONLY, "client"), ("client", _CLIENT_ONLY, "server")]
)
def test_one_extra_is_enough_for_its_package(tmp_path: Path, extra: str, script: str, other: str) -> None:
    """An environment with one extra works, and the other package says which extra it needs."""
    if not _UV.exists():
        pytest.skip("this checkout has no uv; make setup installs it")
    environment = {**os.environ, "UV_PROJECT_ENVIRONMENT": str(tmp_path / "venv"), "VIRTUAL_ENV": ""}
    command = [str(_UV), "sync", "--quiet", "--frozen", "--no-dev", "--extra", extra]
    subprocess.run(command, cwd=ROOT, env=environment, check=True, capture_output=True, timeout=170)
    python = tmp_path / "venv" / "bin" / "python"
    done = subprocess.run(
        [str(python), "-W", "error", "-c", script],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert f"pip install 'residual-store[{other}]'" in done.stdout


def _imported_names() -> Iterator[tuple[str, str, str]]:
    """Module, name and importing file of each import of one of our names out of one of our modules."""
    for path in MODULES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and str(node.module).partition(".")[0] in PACKAGES:
                yield from ((str(node.module), alias.name, _name(path)) for alias in node.names)


def test_what_others_import_is_exported() -> None:
    """``__all__`` says what a module is for, so nobody takes what is not in it; of the errors the whole tree is for all."""
    taken = [
        f"{module}.{name} by {path}"
        for module, name, path in _imported_names()
        if module != "residual_store.errors"
        if not _is_module(f"{module}.{name}") and name not in importlib.import_module(module).__all__
    ]
    assert taken == []


def _is_module(name: str) -> bool:
    folder = PACKAGES[name.partition(".")[0]].joinpath(*name.split(".")[1:])
    return folder.is_dir() or folder.with_suffix(".py").is_file()
