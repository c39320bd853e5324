"""The command: a look into a store, and one line for what goes wrong."""

from __future__ import annotations

import importlib.metadata
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from residual_store import Bundle, open_store
from residual_store.cli import app


@pytest.fixture
def url(tmp_path: Path) -> str:
    """A store on disk with three bundles."""
    with open_store(tmp_path.as_uri()) as store:
        for key in ("run/a", "run/b", "other/a"):
            h = np.arange(3 << 18, dtype=np.float32)
            arrays = {"args[0]['[bold]']": h, "again": h, "mask": np.arange(99) % 2 == 0}
            store.put(key, Bundle.of_arrays(arrays), ttl=5000 if key == "run/b" else None)
    return tmp_path.as_uri()


def _run(*arguments: str) -> str:
    done = CliRunner().invoke(app, list(arguments), env={"COLUMNS": "200"})
    assert done.exit_code == 0, done.output
    return done.output


def test_ls_lists(url: str) -> None:
    """One line for each bundle, with its size, in key order, below a prefix if one is given."""
    lines = _run("ls", "--url", url).splitlines()
    keys = [word for line in lines for word in line.split() if "/" in word]
    assert keys == ["other/a", "run/a", "run/b"]
    assert "3.0 MiB" in "\n".join(lines)
    assert "other/a" not in _run("ls", "run/", "--url", url)


def test_ls_lists_more_than_a_page(tmp_path: Path) -> None:
    """All bundles are listed, however many pages they fill."""
    with open_store(tmp_path.as_uri()) as store:
        for number in range(130):
            store.put(f"run/{number:03}", Bundle.of_arrays({}))
    output = _run("ls", "--url", tmp_path.as_uri())
    assert all(f"run/{number:03}" in output for number in range(130))


def test_show_shows_the_leaves(url: str) -> None:
    """Names come out as they are, brackets and all, with dtype, shape and encoding."""
    output = _run("show", "run/a", "--url", url)
    for text in ("args[0]['[bold]']", "float32", "[786432]", "repeats 0", "bits", "3 leaves"):
        assert text in output, text


def test_rm_removes(url: str) -> None:
    """One bundle, or all below a prefix, and it says how many."""
    assert _run("rm", "run/a", "--url", url) == "deleted run/a\n"
    assert _run("rm", "run/", "--prefix", "--url", url) == "deleted 1 bundles\n"
    with open_store(url) as store:
        assert [entry.key for entry in store.list().entries] == ["other/a"]


def test_the_url_comes_from_the_environment(url: str) -> None:
    """RESIDUAL_STORE_URL stands for --url."""
    done = CliRunner().invoke(app, ["ls"], env={"RESIDUAL_STORE_URL": url, "COLUMNS": "200"})
    assert "run/a" in done.output


def test_the_release_is_printed() -> None:
    """--version prints that of the package."""
    assert _run("--version") == f"residual-store {importlib.metadata.version('residual-store')}\n"


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["show", "run/absent"], "not-found"),
        (["rm", "../x"], "invalid-key"),
        (["ls", "--token", "s3cret"], "invalid-option"),
    ],
)
def test_an_error_is_one_line(url: str, arguments: list[str], code: str) -> None:
    """It goes to stderr with its code, status 1, no traceback and no token."""
    command = [sys.executable, "-m", "residual_store.cli", *arguments, "--url", url]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, env={**os.environ, "NO_COLOR": "1"}
    )
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith(f"{code}: ")
    assert done.stderr.count("\n") == 1
    assert "s3cret" not in done.stderr
