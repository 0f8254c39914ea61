"""A run directory of 0.1.0 (commit 1a84f2f): it resumes, and commands read it, as they do today's.

``tests/older_run`` holds four steps of the quickstart with a random student of one layer, as that
version wrote them (``origin.json`` has the command), with names in ``@`` in place of its paths.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from async_opd.cli import main
from async_opd.config.load import load_config
from async_opd.files.foreign import foreign
from tests.tools.replay import kept
from trainer.build import build_rank
from trainer.replay.kept_step import read_kept, write_kept

ROOT = Path(__file__).parents[1]
OLDER = Path(__file__).parent / "older_run"


@pytest.fixture
def older(tmp_path: Path) -> Path:
    """A copy with the paths of its place, and the digests of the files that have them."""
    shutil.copytree(OLDER, tmp_path, dirs_exist_ok=True)
    run = tmp_path / "run"
    places = {"@EXAMPLES@": ROOT / "examples", "@STUDENT@": tmp_path / "student", "@RUN@": run}

    def placed(text: str) -> str:
        for name, place in places.items():
            text = text.replace(name, str(place))
        return text

    for file in (*run.glob("*.*"), *run.glob("checkpoints/*/config.json")):
        file.write_text(placed(file.read_text()))
    for file in run.glob("replay/*"):
        step = read_kept(foreign(file))
        config = json.loads(placed(json.dumps(step.record.config)))
        write_kept(file, replace(step, record=replace(step.record, config=config)))
    for path in run.glob("checkpoints/*/manifest.json"):
        manifest = json.loads(path.read_text())
        content = (path.parent / "config.json").read_bytes()
        digest = hashlib.sha256(content).hexdigest()
        manifest["config.json"] = {"bytes": len(content), "sha256": digest}
        path.write_text(json.dumps(manifest))
    return run


@pytest.mark.usefixtures("one_bundle")
@pytest.mark.slow
def test_its_report_is_written(older: Path) -> None:
    assert main(["report", str(older)]) == 0
    assert 'pill completed">' in (older / "report.html").read_text()


@pytest.mark.slow
def test_its_student_is_exported(older: Path, tmp_path: Path) -> None:
    assert main(["export", str(older), str(tmp_path / "exported")]) == 0
    folders = older / "model", tmp_path / "exported"
    written, exported = (load_file(folder / "model.safetensors") for folder in folders)
    assert exported.keys() == written.keys()
    assert all(torch.equal(exported[name], written[name]) for name in written)


@pytest.mark.slow
def test_its_last_step_is_computed_again_to_the_bit_on_the_machine_that_made_it(
    older: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """On another one, which a replay refuses, some bits may differ."""
    here = build_rank(load_config(older / "config.yaml"), "cpu", None).platform()
    for file in older.glob("replay/*"):
        step = read_kept(foreign(file))
        made_here = all(step.record.platform[key] == here[key] for key in ("device", "torch"))
        write_kept(file, replace(step, record=replace(step.record, platform=here)))
    kept.launched(monkeypatch)
    code = main(["replay", str(older), "--step", "4", "--json"])
    equal = json.loads(capsys.readouterr().out)["equal"]
    assert (code, equal) == (0, True) or (not made_here and (code, equal) == (1, False))


@pytest.mark.engine
@pytest.mark.long
def test_it_is_resumed_after_a_checkpoint(older: Path) -> None:
    """As it lay when it was interrupted between its two checkpoints."""
    shutil.rmtree(older / "checkpoints" / "step_4")
    shutil.rmtree(older / "model")
    (older / "summary.json").unlink()
    command = [sys.executable, "-m", "async_opd", "run", str(older / "config.yaml"), "--resume"]
    done = subprocess.run(command, cwd=older.parent, timeout=600)
    assert done.returncode == 0
    rows, before = (
        [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        for run in (older, OLDER / "run")
    )
    assert [row["step"] for row in rows if "loss/total" in row] == [1, 2, 3, 4]
    assert rows[:4] == before[:4]  # evaluations, and the steps before the checkpoint
    assert json.loads((older / "summary.json").read_text())["status"] == "completed"
