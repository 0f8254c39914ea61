"""On a CPU the rows that need torch alone measure every cell that needs no GPU."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from async_opd.tools.qualify.rows import ROWS, reason

pytestmark = pytest.mark.long
NAMES = [name for name, row in ROWS.items() if row.cpu and not row.packages]
NEEDS_GPU = {
    "losses": {"recompiles"},
    "rank": {"varlen", "flex", "parts"},
    "scoring": {"float32_logits"},
    "snapshot": {"pinned, made once", "pinned", "context"},
    "streams": {"own"},
}
"""The cells that each row skips on a CPU."""


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Of all rows of NAMES, measured without GPUs."""
    path = tmp_path_factory.mktemp("qualify") / "report.json"
    words = ["--gpus", "0", "--out", str(path), "--only", ",".join(NAMES)]
    command = [sys.executable, "-m", "async_opd", "qualify", *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout + done.stderr
    found: dict[str, Any] = json.loads(Path(path).read_text())
    return found


@pytest.mark.parametrize("name", NAMES)
def test_a_row_measures_every_cell_that_needs_no_gpu(name: str, report: dict[str, Any]) -> None:
    row = report["rows"][name]
    assert row["outcome"] == "passed"
    skipped = [cell for cell in row["cells"] if reason(cell)]
    needs = NEEDS_GPU.get(name, set())
    assert all(needs & {str(value) for value in cell.values()} for cell in skipped)
    assert len(skipped) < len(row["cells"])
    figures = [value for cell in row["cells"] for value in cell.values()]
    assert all(math.isfinite(value) for value in figures if isinstance(value, float))


def test_the_report_says_which_machine_it_is_of(report: dict[str, Any]) -> None:
    import torch

    assert (report["machine"]["device"], report["machine"]["gpus"]) == ("cpu", 0)
    assert report["machine"]["versions"]["torch"] == torch.__version__


@pytest.mark.parametrize("name", ["ranks", "context"])
def test_two_ranks_train_as_one(name: str, report: dict[str, Any]) -> None:
    _, *ways = report["rows"][name]["cells"]
    assert [cell["way"] for cell in ways] == list(ROWS[name].given)
    assert max(cell["difference"] for cell in ways) < 1e-3
    assert [cell["norm_ratio"] for cell in ways] == pytest.approx([1.0] * len(ways), rel=1e-3)


def test_a_killed_receiver_ends_the_send(report: dict[str, Any]) -> None:
    cells = [cell for cell in report["rows"]["weights"]["cells"] if cell["what"] == "dies"]
    assert [cell["backend"] for cell in cells] == ["gloo", "shared_memory"]
    assert all(cell["error"] for cell in cells)


def test_a_mesh_of_one_trains_as_no_mesh(report: dict[str, Any]) -> None:
    cells = report["rows"]["fsdp"]["cells"]
    assert [cell["mesh"] for cell in cells] == ["none", "1, gloo"]
    assert cells[1]["difference"] < 1e-3


def test_pinned_memory_is_measured_before_any_other_is_pinned(report: dict[str, Any]) -> None:
    assert report["rows"]["snapshot"]["cells"][0]["of"] == "pinned"
