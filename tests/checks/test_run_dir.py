"""Run directories that cannot be made, and disks without room for the run's files."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from async_opd.checks.run_dir import run_dir_problems, space_of
from async_opd.core.errors import ConfigError, Problem
from async_opd.models.model_size import ModelSize, Tower
from async_opd.prepare import prepare
from tests.checks.inputs import config


def problems(run_dir: object, *overrides: str, resume: bool = False) -> list[Problem]:
    made = config(*overrides).model_copy(update={"run_dir": str(run_dir)})
    return list(run_dir_problems(made, "c.yaml", resume))


@pytest.mark.parametrize("run_dir", ["/dev/null/x", "/proc/foo", "a" * 300, "a\0b"])
def test_a_directory_that_cannot_be_made_is_one_problem(run_dir: str) -> None:
    (problem,) = problems(run_dir)
    assert (problem.key, "cannot be written" in problem.message) == ("run_dir", True)
    assert problem.remedy.startswith("choose another run_dir")


def test_a_directory_that_can_be_made_is_not_made(tmp_path: Path) -> None:
    assert problems(tmp_path / "a" / "b") == []
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Disks of a MiB of which 200 KiB are free."""
    usage = SimpleNamespace(total=1 << 20, free=200 << 10)
    monkeypatch.setattr("async_opd.checks.run_dir.shutil.disk_usage", lambda path: usage)


def test_a_small_disk_is_refused_with_what_the_run_needs(tmp_path: Path, small: None) -> None:
    (problem,) = problems(tmp_path)
    assert "has 0.2 MiB, the run needs " in problem.message
    assert "3 checkpoints, one of them being written" in problem.message
    assert "checkpoint.keep" in problem.remedy


def test_a_resumed_run_does_not_need_again_the_room_of_its_files(
    tmp_path: Path, small: None
) -> None:
    kept = tmp_path / "checkpoints" / "step_4"
    kept.mkdir(parents=True)
    with (kept / "trainer-0-of-1.safetensors").open("wb") as file:
        file.truncate(1 << 30)
    assert problems(tmp_path, resume=True) == []


def test_a_completed_run_needs_no_room(tmp_path: Path, small: None) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "summary.json").write_text('{"status": "completed"}')
    assert problems(tmp_path, resume=True) == []


@pytest.mark.parametrize(("freeze", "trained"), [((), 1000), (("vision_tower",), 400)])
def test_frozen_parts_are_in_no_checkpoint(
    monkeypatch: pytest.MonkeyPatch, freeze: tuple[str, ...], trained: int
) -> None:
    size = ModelSize(1000, 0, 1, 1, 1, 1, tower=Tower(600, 1, 1, 1, 1, 1))
    monkeypatch.setattr(ModelSize, "of_weights", lambda model: size)
    made = config("checkpoint.keep=1", "checkpoint.every=1")
    made = made.model_copy(update={"train": made.train.model_copy(update={"freeze": freeze})})
    assert space_of(made).needed == 2 * 12 * trained + 2 * 1000


@pytest.mark.parametrize(("steps", "kept"), [(8, 2), (9, 3), (400, 4)])
def test_a_short_run_has_no_more_checkpoints_than_it_makes(steps: int, kept: int) -> None:
    made = config(f"train.steps={steps}", "async.sync_steps=1", "checkpoint.every=4")
    made = made.model_copy(update={"checkpoint": made.checkpoint.model_copy(update={"keep": 3})})
    assert f"{kept} checkpoints" in space_of(made).terms


def test_records_whose_oldest_are_removed_are_not_needed(tmp_path: Path) -> None:
    space = space_of(config("log.replay=true"), free=16 << 30)
    assert space.needed is not None
    assert space.needed < space.free < space.most


def test_adapters_and_a_run_of_few_steps_need_less() -> None:
    full, adapters, short = (
        space_of(config(*given)).needed or 0
        for given in ([], ["train.lora.rank=1"], ["train.steps=4"])
    )
    assert 0 < adapters < full
    assert 0 < short < full


@pytest.mark.parametrize("login", [False, True])
def test_wandb_online_without_a_login_is_refused(
    login: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("async_opd.observability.wandb_sink.has_login", lambda: login)
    made = config("log.wandb=online")
    if login:
        prepare(made, "c.yaml", fetch=False, load=False)
        return
    with pytest.raises(ConfigError, match=r"log.wandb: found online.*\n +→ wandb login"):
        prepare(made, "c.yaml", fetch=False, load=False)


def test_too_many_epochs_and_a_run_directory_that_cannot_be_made_are_reported_together() -> None:
    made = config()
    train = made.train.model_copy(update={"epochs": 1e12})
    made = made.model_copy(update={"train": train, "run_dir": "/proc/foo"})
    with pytest.raises(ConfigError) as caught:
        prepare(made, "c.yaml", fetch=False, load=False)
    assert {one.key for one in caught.value.problems} >= {"train.epochs", "run_dir"}
