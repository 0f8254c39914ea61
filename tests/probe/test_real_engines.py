"""``async_opd probe`` with the quickstart's student and one teacher in real engines."""

from __future__ import annotations

import json
import subprocess
import sys
from itertools import islice
from pathlib import Path

import pytest

from tests.checks.inputs import EXAMPLE, MODELS

BOUND_S = 400


@pytest.mark.engine
@pytest.mark.long
def test_the_quickstarts_teacher_will_teach_its_student(tmp_path: Path) -> None:
    train = EXAMPLE.parent / "quickstart" / "data" / "train.jsonl"
    rows = (line for line in train.read_text().splitlines() if '"data_source": "sort"' in line)
    data = tmp_path / "rows.jsonl"
    data.write_text("\n".join(islice(rows, 64)))
    teachers = f"teachers={{sort: {{model: {MODELS / 'teacher-sort'}}}}}"
    given = [str(EXAMPLE), f"data.train=[{data}]", "data.eval=[]", teachers]
    done = subprocess.run(
        [sys.executable, "-m", "async_opd.cli", "probe", *given, "--prompts", "48", "--json"],
        capture_output=True,
        text=True,
        timeout=BOUND_S,
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (found,) = json.loads(done.stdout)["pairs"]
    assert found["verdict"]["kind"] == "will_teach", found
    assert found["prompts"] == 48
    assert found["teacher_accuracy"]["mean"] > 0.9
    assert found["student_accuracy"]["mean"] < 0.5
    assert found["forward"] > 100 * found["floor"]["mean"], found["floor"]
    assert found["floor"]["mean"] < 1e-4
    assert list(tmp_path.iterdir()) == [data]
