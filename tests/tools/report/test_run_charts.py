"""How pools spent their time is drawn though some steps have no report of them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from async_opd.tools.report.recorded_run import read_recorded_run
from async_opd.tools.report.run_charts import pool_charts
from tests.tools.report.pages import write_full_run


@pytest.mark.parametrize("first", [True, False])
def test_a_wait_that_only_some_windows_have_is_drawn_for_all(tmp_path: Path, first: bool) -> None:
    folder = write_full_run(tmp_path / "run", hostile=False)
    file = folder / "metrics.jsonl"
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    for row in rows:
        row.pop("train/wait_gpu_s", None)
        if "perf/step_s" in row and (row["step"] <= 18) == first:
            row["train/wait_gpu_s"] = 0.01
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    charts = {one.key: one for one in pool_charts(read_recorded_run(folder))}
    trainer = list(charts.values())[-1]
    assert "GPUs that other pools use" in trainer.columns
