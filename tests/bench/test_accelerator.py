"""The benchmark of the accelerator runs to its end on the CPU backend, says that this is none, and writes its figures."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.bench.accelerator import main


def test_it_runs_on_the_cpu_backend_and_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Both ways give the same leaves, which the benchmark itself compares, and every figure is there."""
    file = tmp_path / "figures.json"
    main(["--quick", "--json", str(file)])
    printed, figures = capsys.readouterr().out, json.loads(file.read_text())
    assert "This is the CPU backend and no accelerator" in printed
    assert (figures["platform"], figures["taken"]) == ("cpu", "plain")
    assert figures["plainly"] == {"cpu arrays are in host memory as they are": figures["leaves"]}
    assert set(figures["limits"]) == {"to_pinned", "from_pinned", "memcpy"}
    for way in ("pinned", "plain"):
        assert all(figures["ways"][way][step]["of_limit"] > 0 for step in ("offload", "restore"))
