"""``doctor --engines`` with the quickstart's student and one teacher in real engines."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.checks.inputs import EXAMPLE, MODELS

BOUND_S = 900


@pytest.mark.engine
@pytest.mark.long
@pytest.mark.slow
def test_engines_of_a_working_run_agree_within_rounding_and_take_an_update(tmp_path: Path) -> None:
    data = tmp_path / "rows.jsonl"
    prompts = [{"prompt": f"sort {493021 + 7 * at}=", "data_source": "sort"} for at in range(8)]
    data.write_text("\n".join(map(json.dumps, prompts)))
    teachers = f"teachers={{sort: {{model: {MODELS / 'teacher-sort'}, replicas: 2}}}}"
    given = [str(EXAMPLE), f"data.train=[{data}]", "data.eval=[]", teachers]
    command = [sys.executable, "-m", "async_opd", "doctor", *given]
    done = subprocess.run(
        [*command, "--engines", "--json"],
        capture_output=True,
        text=True,
        timeout=BOUND_S,
        cwd=tmp_path,
        start_new_session=True,  # Linux shares cores among sessions first
    )
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [one for one in json.loads(done.stdout)["findings"] if one["topic"] == "engines"]
    assert {one["status"] for one in lines} == {"ok"}, lines
    compared = [one["found"].partition(",")[0].partition(":")[0] for one in lines]
    floors = ["mismatch floor"] * 2
    assert compared == ["first weights", "one update", *floors, "teachers.sort"], lines
    assert list(tmp_path.iterdir()) == [data]
