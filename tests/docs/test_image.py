"""The image: its steps replayed without a container engine, and what its files say of the code."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from dataclasses import fields
from pathlib import Path

import pytest
import typer.main

from residual_store import Settings, cli
from tests.docs.pages import ROOT, page


@pytest.mark.skipif(
    shutil.which("uv", path=f"{ROOT / '.tools/bin'}{os.pathsep}{os.environ['PATH']}") is None,
    reason="the install steps are those of uv",
)
def test_the_steps_of_the_image_give_a_server_that_works(tmp_path: Path) -> None:
    """docker/replay.sh installs, serves, puts, gets and stops, and leaves nothing behind."""
    done = subprocess.run(
        [ROOT / "docker/replay.sh"],
        env={**os.environ, "TMPDIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=150,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.endswith("the replay is complete; no image was built\n")
    assert not list(tmp_path.iterdir())


def test_the_build_context_has_what_the_image_copies() -> None:
    """Each file that the Dockerfile copies exists and passes the ignore file, which lets nothing else pass."""
    copied = {
        source
        for line in re.findall(r"^COPY (?!--)(.+)$", page("docker/Dockerfile"), flags=re.MULTILINE)
        for source in line.split()[:-1]
    }
    ignored = page("docker/Dockerfile.dockerignore").splitlines()
    assert {line[1:] for line in ignored if line.startswith("!")} == copied
    assert "*" in ignored
    assert all((ROOT / source).exists() for source in copied)


def test_the_image_has_the_port_of_the_server() -> None:
    """Dockerfile and compose file expose and check the port that `serve` binds by default."""
    serve = typer.main.get_command(cli.app).commands["serve"]  # type: ignore[attr-defined]
    (port,) = [str(parameter.default) for parameter in serve.params if parameter.name == "port"]
    assert re.findall(r"^EXPOSE (\d+)$", page("docker/Dockerfile"), flags=re.MULTILINE) == [port]
    assert f"http://127.0.0.1:{port}/readyz" in page("docker/Dockerfile")
    assert f'"127.0.0.1:{port}:{port}"' in page("docker/compose.yml")


def test_the_compose_file_sets_what_there_is() -> None:
    """Each variable of the compose file is a setting, and the stop takes longer than the server needs."""
    text = page("docker/compose.yml")
    known = {f"RESIDUAL_STORE_{setting.name.upper()}" for setting in fields(Settings)}
    assert set(re.findall(r"RESIDUAL_STORE_[A-Z_]+", text)) <= known
    (seconds,) = re.findall(r"stop_grace_period: (\d+)s", text)
    assert int(seconds) > Settings().graceful_seconds
