"""``doctor --engines`` with the quickstart's student and one teacher in real engines."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.checks.inputs import EXAMPLE, MODELS

BOUND_S = 900


def doctor(folder: Path, teacher: str) -> tuple[int, list[dict[str, str]]]:
    """The exit code, and the lines on engines."""
    data = folder / "rows.jsonl"
    prompts = [{"prompt": f"sort {493021 + 7 * at}=", "data_source": "sort"} for at in range(8)]
    data.write_text("\n".join(map(json.dumps, prompts)))
    teachers = f"teachers={{sort: {{model: {MODELS / 'teacher-sort'}, {teacher}}}}}"
    given = [str(EXAMPLE), f"data.train=[{data}]", "data.eval=[]", teachers]
    done = subprocess.run(
        [sys.executable, "-m", "async_opd", "doctor", *given, "--engines", "--json"],
        capture_output=True,
        text=True,
        timeout=BOUND_S,
        cwd=folder,
        start_new_session=True,  # Linux shares cores among sessions first
    )
    try:
        lines = json.loads(done.stdout)["findings"]
    except ValueError:
        pytest.fail(done.stdout + done.stderr)
    assert list(folder.iterdir()) == [data]
    return done.returncode, [one for one in lines if one["topic"] == "engines"]


@pytest.mark.engine
@pytest.mark.long
@pytest.mark.slow
def test_engines_of_a_working_run_agree_within_rounding_and_take_an_update(tmp_path: Path) -> None:
    code, lines = doctor(tmp_path, "replicas: 2")
    assert code == 0, lines
    assert {one["status"] for one in lines} == {"ok"}, lines
    compared = [one["found"].partition(",")[0].partition(":")[0] for one in lines]
    floors = ["mismatch floor"] * 2
    assert compared == ["first weights", "one update", *floors, "teachers.sort"], lines


@pytest.mark.engine
@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize(("bound", "status"), [("", "ok"), (", max_bias: 0", "error")])
def test_a_teacher_in_float8_has_its_bias_measured_and_refused_above_the_bound(
    bound: str, status: str, tmp_path: Path
) -> None:
    code, lines = doctor(tmp_path, f"engine: {{quantization: fp8_per_channel}}{bound}")
    (line,) = [one for one in lines if "precision" in one["found"]]
    assert line["status"] == status, line
    found = re.search(r"bias of (\S+) nats a token: ([\d.]+)% of the signal", line["found"])
    assert found is not None, line
    assert float(found[1]) > 0, "the engine quantizes"
    assert float(found[2]) < 10, "float8 of the quickstart's teacher"
    assert (code == 0) == (status == "ok")
    assert "teachers.sort.max_bias" in line["found"] or not bound
