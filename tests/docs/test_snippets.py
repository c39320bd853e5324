"""Every snippet of the documentation does what the page says; `tests.docs.pages` has the conventions."""

from __future__ import annotations

import contextlib
import io
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.docs.pages import PAGES, ROOT, Block, blocks

_RUN = ("python", "bash", "bash server")
_KNOWN = {*_RUN, "output", "text"}
_PORT = re.compile(r"\b873[1-9]\b")


class Session:
    """A reader who follows one page from its top, in a directory of its own."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._ports: dict[str, str] = {}
        self._names: dict[str, Any] = {"__name__": "page"}
        self._servers: list[subprocess.Popen[str]] = []
        self._environment = {
            name: value for name, value in os.environ.items() if not name.startswith("RESIDUAL_STORE_")
        }
        self._environment["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"

    def lay_out(self, files: Iterable[Path]) -> None:
        """Copy files into the directory."""
        for file in files:
            shutil.copy(file, self._folder)

    def run(self, block: Block) -> str:
        """Do what the block says, and return what it printed."""
        code = self.with_ports(block)
        if block.language == "bash server":
            return self._serve(block, code)
        if block.language == "bash":
            return self._shell(block, code)
        if block.file_name is not None:
            (self._folder / block.file_name).write_text(code)
            return ""
        with contextlib.redirect_stdout(io.StringIO()) as output:
            # Empty lines in front, so that a traceback names the line of the page.
            exec(compile("\n" * (block.line - 1) + code, str(block.path), "exec"), self._names)
        return output.getvalue()

    def with_ports(self, block: Block) -> str:
        """The code of a block with free ports in the place of those that the page shows."""
        return _PORT.sub(lambda found: self._port(found[0]), block.code)

    def stop(self) -> None:
        """Stop the servers of the page; each ends with status 0."""
        for server in self._servers:
            server.send_signal(signal.SIGTERM)
        for server in self._servers:
            assert server.wait(30) == 0
            assert server.stdout is not None
            server.stdout.close()

    def _port(self, shown: str) -> str:
        if shown not in self._ports:
            with socket.create_server(("127.0.0.1", 0)) as listener:
                self._ports[shown] = str(listener.getsockname()[1])
        return self._ports[shown]

    def _shell(self, block: Block, code: str) -> str:
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", code],
            cwd=self._folder,
            env=self._environment,
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert done.returncode == 0, f"{block.place}: {done.stdout}{done.stderr}"
        return done.stdout

    def _serve(self, block: Block, code: str) -> str:
        server = subprocess.Popen(
            ["bash", "-euo", "pipefail", "-c", f"exec {code}"],
            cwd=self._folder,
            env=self._environment,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._servers.append(server)
        assert server.stdout is not None
        line = server.stdout.readline()
        assert " listens on " in line, f"{block.place}: {line!r}"
        return line


@pytest.fixture
def reader(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Session]:
    """A reader in an empty directory, whose servers are stopped at the end."""
    monkeypatch.chdir(tmp_path)
    for name in [name for name in os.environ if name.startswith("RESIDUAL_STORE_")]:
        monkeypatch.delenv(name)
    session = Session(tmp_path)
    try:
        yield session
    finally:
        session.stop()


@pytest.mark.parametrize(
    "path",
    [path for path in PAGES if any(block.language in _RUN for block in blocks(path))],
    ids=lambda path: str(path.relative_to(ROOT)),
)
def test_a_page_can_be_followed(path: Path, reader: Session) -> None:
    """All blocks of a page run in the order in which they stand, and print what the page says they print."""
    reader.lay_out(path.parent.glob("*.py"))
    printed = ""
    for block in blocks(path):
        if block.language in _RUN:
            printed = reader.run(block)
        elif block.language == "output":
            assert printed.split() == reader.with_ports(block).split(), block.place


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_block_says_what_happens_to_it(path: Path) -> None:
    """No block has a language that the tests pass over without a word."""
    assert {block.language for block in blocks(path)} <= _KNOWN


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_file_that_a_page_shows_is_the_file(path: Path) -> None:
    """A named block whose file stands beside the page has its text, word for word."""
    for block in blocks(path):
        file = path.parent / (block.file_name or "")
        if file.is_file():
            assert block.code.partition("\n")[2] == file.read_text(), block.place
