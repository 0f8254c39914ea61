"""``async_opd run --dry-run``: all that a run does before its engines start, without a trace."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from pydantic import TypeAdapter

from async_opd.accounting.lineage import RollBack, add_roll_back, begun_after
from async_opd.accounting.run_state import Cut
from async_opd.checkpoint.earlier_run import outputs
from async_opd.checkpoint.resume import identity
from async_opd.checkpoint.run_copies import END, RunCopies
from async_opd.checkpoint.store import CONFIG, CUT, FOLDER, MANIFEST
from async_opd.cli import main
from async_opd.config.load import load_config
from async_opd.files.run_format import write_run_format
from tests.checkpoint.test_store import cut
from tests.world.cli import Cli

EXAMPLE = str(Path(__file__).parents[2] / "examples" / "quickstart.yaml")
FEW = "data.train=quickstart/data/eval.jsonl"


def dry_run(*arguments: str) -> int:
    return main(["run", EXAMPLE, FEW, "--dry-run", *arguments])


@pytest.fixture
def begun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run directory with a checkpoint of step 8, in the working directory."""
    from async_opd.prepare import prepare

    monkeypatch.chdir(tmp_path)
    config = load_config(EXAMPLE, [FEW, "run_dir=runs/mine"])
    ready = prepare(config, EXAMPLE, fetch=False, load=False)
    step = tmp_path / "runs" / "mine" / FOLDER / "step_8"
    step.mkdir(parents=True)
    write_run_format(step.parents[1])
    (step / MANIFEST).write_text("{}")
    now = identity(ready.config, ready.inputs.checked)
    (step / CONFIG).write_text(now)
    return step.parents[1]


def files(folder: Path) -> set[Path]:
    return set(folder.rglob("*"))


def test_it_names_what_the_run_would_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert dry_run("log.replay=true", "checkpoint.keep_best=eval/*/accuracy") == 0
    (said,) = [line for line in capsys.readouterr().out.splitlines() if "would write" in line]
    assert said.startswith("the run would write runs/quickstart-DATE/: config.yaml, ")
    assert {"model", "replay", "best", "evals"} <= set(said.partition(": ")[2].split(", "))
    assert files(tmp_path) == set()


def test_a_directory_with_a_run_is_refused_without_resume(
    begun: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = files(begun)
    assert dry_run("--run-dir", "runs/mine") == 2
    assert "holds an earlier run: checkpoints" in capsys.readouterr().err
    assert files(begun) == before


def test_it_says_after_which_step_a_resumed_run_would_go_on(
    begun: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = files(begun)
    assert dry_run("--run-dir", "runs/mine", "--resume") == 0
    assert "the run would go on after step 8 of 200" in capsys.readouterr().out
    assert files(begun) == before


def test_a_step_that_a_rollback_has_left_is_not_the_one_to_go_on_after(
    begun: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first = begun_after(0, ())
    made = TypeAdapter(Cut).dump_json(replace(cut(8), lineage=first))
    (begun / FOLDER / "step_8" / CUT).write_bytes(made)
    add_roll_back(begun, RollBack(8, "cut off", begun_after(0, first)))
    assert dry_run("--run-dir", "runs/mine", "--resume") == 0
    assert "the run would go on after step 0 of 200" in capsys.readouterr().out


def test_a_newer_step_of_the_mirror_is_named(
    begun: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copies = RunCopies.at(f"file://{tmp_path}/mirror")
    copies.upload("step_9", {"run.log": Path(__file__)}, lambda files: None)
    before = files(tmp_path)
    mirror = f"checkpoint.mirror=file://{tmp_path}/mirror"
    assert dry_run("--run-dir", "runs/mine", "--resume", mirror) == 0
    assert f"takes step 9 from file://{tmp_path}/mirror, if it is whole" in capsys.readouterr().out
    assert files(tmp_path) == before


def test_a_run_of_another_config_is_refused(
    begun: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert dry_run("--run-dir", "runs/mine", "--resume", "train.lr=1e-3") == 2
    assert "train.lr: the run began with 0.002, now it is 0.001" in capsys.readouterr().err


def test_a_completed_run_is_reported_as_complete(
    begun: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (begun / "summary.json").write_text(json.dumps({"status": "completed"}))
    (begun / "model").mkdir()
    assert dry_run("--run-dir", "runs/mine", "--resume") == 0
    assert "runs/mine is completed already" in capsys.readouterr().out


def test_a_model_of_the_hub_is_compared_after_its_download(
    begun: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    missing = "student.model=nobody/has-this-model"
    assert dry_run("--run-dir", "runs/mine", "--resume", missing) == 0
    assert "compared with the config after the downloads" in capsys.readouterr().out


def test_optional_files_are_named_where_they_are_written() -> None:
    plain, more = (
        outputs(load_config(EXAMPLE, [*given]))
        for given in (["log.wandb=off", "data.eval=[]"], ["log.loggers=[tensorboard]"])
    )
    assert {"wandb", "evals", "tensorboard"} & set(plain) == set()
    assert {"wandb", "evals", "tensorboard"} <= set(more)


def test_a_mirror_with_another_run_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "summary.json").write_text("{}")
    copies = RunCopies.at(f"file://{tmp_path}/mirror")
    copies.upload(END, {"summary.json": tmp_path / "summary.json"}, lambda files: None)
    assert dry_run(f"checkpoint.mirror=file://{tmp_path}/mirror") == 2
    assert "mirror holds an earlier run" in capsys.readouterr().err


@pytest.mark.parametrize("command", [["run", "--dry-run"], ["run"], ["check"]])
@pytest.mark.parametrize("run_dir", ["/dev/null/x", "/proc/foo"])
def test_a_run_directory_that_cannot_be_made_is_refused_by_all_commands(
    command: list[str], run_dir: str, cli: Cli
) -> None:
    printed = cli(command[0], EXAMPLE, FEW, *command[1:], "--run-dir", run_dir, code=2)
    assert f"run_dir: {run_dir} cannot be written" in printed.err


@pytest.mark.parametrize("command", [[], ["--dry-run"]])
def test_a_run_directory_that_does_not_exist_cannot_be_resumed(
    command: list[str], begun: Path, cli: Cli
) -> None:
    said = cli("run", EXAMPLE, FEW, *command, "--run-dir", "runs/mien", "--resume", code=2).err
    assert f"{begun.parent}/mien does not exist, and --resume continues" in said
    assert f"→ did you mean {begun}?" in said
    assert not (begun.parent / "mien").exists()
