"""``log.replay`` keeps steps: until when, within which bounds, and what it does when it cannot."""

from __future__ import annotations

import math
import shutil
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from async_opd.accounting.journal import LEDGER
from async_opd.checkpoint.resume import cut_files
from async_opd.checkpoint.store import Checkpoints
from async_opd.cli import main
from async_opd.config.run_config import RunConfig
from async_opd.files.kept_steps import KEPT, kept_name
from tests.checkpoint.test_store import cut
from tests.tools.replay import kept
from tests.trainer.models import tiny_model
from trainer.learner import Learner
from trainer.losses import build_objective
from trainer.rank import Rank
from trainer.replay import keeper as keeping
from trainer.replay.keeper import Keeper
from trainer.replay.kept_step import read_kept, read_record
from trainer.student.placed import PlacedStudent


def tiny_learner(config: RunConfig) -> Learner:
    """A student of 2 layers in place of the config's, which keeps its steps."""
    objective = build_objective(config.loss)
    rank = Rank(PlacedStudent(tiny_model(), objective, config.train, torch.device("cpu")))
    if config.log.replay:
        rank.keeper = Keeper(config, platform=rank.platform())
    return Learner(rank)


def steps_in(folder: Path) -> list[int]:
    """The steps that are kept."""
    return sorted(int(name.split(".")[0].removeprefix("step_")) for name in kept.names(folder))


@pytest.fixture
def config(tmp_path: Path) -> RunConfig:
    made = kept.config_of(tmp_path)
    kept.begin(made, tmp_path)
    return made


def test_a_file_has_samples_headers_and_results_of_a_step(
    config: RunConfig, tmp_path: Path
) -> None:
    metrics = kept.train(config, tiny_learner(config), range(1, 6))
    found = read_kept(tmp_path / KEPT / kept_name(5, 0, 1))
    given = {sample.rollout.uid: sample for sample in kept.batch(config, 5)}
    assert {one.rollout.uid for one in found.samples} == given.keys()
    for sample in found.samples:
        expected = given[sample.rollout.uid]
        assert sample.header == expected.header
        assert (sample.rollout.token_ids == expected.rollout.token_ids).all()
        assert (sample.scores.logprobs == expected.scores.logprobs).all()  # type: ignore[union-attr]
    result = found.record.result
    assert result.headers == tuple(s.header for s in kept.batch(config, 5))
    assert float.fromhex(result.quantities["loss/total"]) == metrics[4]["loss/total"]
    assert float.fromhex(result.quantities["train/grad_norm"]) == metrics[4]["train/grad_norm"]
    assert found.record.version == 2  # of two steps each


def test_steps_before_the_oldest_checkpoint_are_removed_with_the_one_before_it(
    config: RunConfig, tmp_path: Path
) -> None:
    learner = tiny_learner(config)
    kept.train(config, learner, range(1, 17), keep=2)
    assert steps_in(tmp_path / KEPT) == list(range(1, 17))  # the start counts until then
    store = Checkpoints(tmp_path / "checkpoints", 2)
    kept.train(config, learner, range(17, 20), keep=2)
    kept.take(store, learner, 19)
    assert store.steps() == [16, 19]
    assert steps_in(tmp_path / KEPT) == [17, 18, 19]


def test_steps_after_the_checkpoint_of_a_resume_are_removed(
    config: RunConfig, tmp_path: Path
) -> None:
    kept.train(config, tiny_learner(config), range(1, 12))
    cut_files(tmp_path, replace(cut(8), files={LEDGER: 0}))
    assert steps_in(tmp_path / KEPT) == list(range(1, 9))
    cut_files(tmp_path, None)
    assert steps_in(tmp_path / KEPT) == []


def test_a_step_that_is_run_again_replaces_what_the_dead_part_wrote(
    config: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dead, learner = tiny_learner(config), tiny_learner(config)
    kept.train(config, dead, range(1, 12))
    before = read_record(tmp_path / KEPT / kept_name(9, 0, 1)).result
    learner.restore(str(tmp_path / "checkpoints" / "step_8"))
    kept.train(config, learner, range(9, 11), factor=0.5)
    after = read_record(tmp_path / KEPT / kept_name(9, 0, 1)).result
    assert before.part != after.part
    assert (before.lr_factor, after.lr_factor) == (1, 0.5)
    kept.launched(monkeypatch, tiny_learner)
    assert main(["replay", str(tmp_path), "--step", "10"]) == 0  # at half the learning rate
    assert main(["replay", str(tmp_path), "--step", "11"]) == 1  # not cut: the dead part's


def test_a_skipped_step_is_kept_and_is_bit_equal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config = kept.config_of(tmp_path, "train.on_nonfinite=skip")
    kept.begin(config, tmp_path)

    def exploding(config: RunConfig) -> Learner:
        learner = tiny_learner(config)
        with torch.no_grad():
            learner.model.model.norm.weight.fill_(math.nan)
        return learner

    kept.train(config, exploding(config), range(1, 3))
    result = read_record(tmp_path / KEPT / kept_name(1, 0, 1)).result
    assert result.skipped
    assert result.quantities["loss/total"] == "nan"
    kept.launched(monkeypatch, exploding)
    assert main(["replay", str(tmp_path), "--step", "2", "--json"]) == 0


def test_beyond_its_bound_the_oldest_steps_are_removed_and_counted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = kept.config_of(tmp_path, "log.replay_gib=0.0001")
    kept.begin(config, tmp_path)
    metrics = kept.train(config, tiny_learner(config), range(1, 15))
    files = list((tmp_path / KEPT).iterdir())
    assert sum(file.stat().st_size for file in files) <= 0.0001 * (1 << 30)
    left = steps_in(tmp_path / KEPT)
    assert left == list(range(left[0], 15))
    assert left[0] > 1
    assert 0 < metrics[-1]["replay/removed"] <= left[0] - 1  # what was known before the last step
    assert metrics[-1]["replay/lost"] == 0


class Usage(NamedTuple):
    free: int


def test_a_full_disk_ends_keeping_with_one_message_and_a_count_and_training_goes_on(
    config: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    learner = tiny_learner(config)
    kept.train(config, learner, range(1, 3))
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(keeping.LEFT_BYTES + 100))
    kept.train(config, learner, range(3, 4))
    reports = [learner.train_batch(kept.batch(config, step)) for step in range(4, 7)]
    assert [report.metrics["replay/lost"] for report in reports] == [1, 2, 3]
    (note,) = [note for report in reports for note in report.notes]
    assert note.startswith("step 4 and all after it are not kept for replay: OSError: ")
    assert "would have 1023 MiB of free space left" in note
    assert steps_in(tmp_path / KEPT) == [1, 2]
    assert kept.names(tmp_path / KEPT) == [kept_name(step, 0, 1) for step in (1, 2)]


def test_a_disk_slower_than_training_loses_steps_that_are_counted_and_holds_up_none(
    config: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers, write = threading.Event(), keeping.write_kept

    def slow(*given: Any) -> int:
        assert answers.wait(60)
        return write(*given)

    monkeypatch.setattr(keeping, "write_kept", slow)
    learner = tiny_learner(config)
    reports = [learner.train_batch(kept.batch(config, step)) for step in range(1, 5)]
    assert [report.metrics["replay/lost"] for report in reports] == [0, 0, 1, 2]
    (note,) = [note for report in reports for note in report.notes]
    assert note == "step 3 is not kept for replay: the disk is slower than training"
    answers.set()
    learner.compared("flush_records")
    learner.train_batch(kept.batch(config, 5))
    learner.compared("flush_records")
    assert steps_in(tmp_path / KEPT) == [1, 2, 5]
