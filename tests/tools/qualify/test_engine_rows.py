"""The rows of ``qualify`` that start engines run on a CPU: a whole run, and engines alone."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROWS = ("run_shared_memory", "sleep", "worker_fault", "image_engines")


@pytest.mark.engine
@pytest.mark.long
def test_a_run_and_engines_that_sleep_fail_or_see_images_pass_their_rows_on_a_cpu(
    tmp_path: Path,
) -> None:
    path = tmp_path / "report.json"
    words = ["--gpus", "0", "--out", str(path), "--only", ",".join(ROWS)]
    command = [sys.executable, "-m", "async_opd", "qualify", *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1200)
    rows = json.loads(path.read_text())["rows"]
    outcomes = {name: (row["outcome"], row["why"]) for name, row in rows.items()}
    assert outcomes == {name: ("passed", []) for name in ROWS}
    assert done.returncode == 0, done.stdout + done.stderr
