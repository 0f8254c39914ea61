"""The planner's question for each verdict, and that its answer is a gain."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from async_opd.tools.plan.setting import Setting
from async_opd.tools.report.forecast import Forecast, changes, forecast
from async_opd.tools.report.recorded_run import read_recorded_run
from async_opd.tools.report.verdict import Verdict, judge
from tests.tools.plan.runs import write_run
from tests.tools.report.simulated import record
from tests.tools.report.test_verdict import balanced, slow_trainer

ONE = balanced(3, 8, 16)


def limited(pool: str, *starved: str) -> Verdict:
    return Verdict("pool", "", (), "", pool, starved)


def split(setting: Setting) -> tuple[int, int, int, int]:
    a, b = setting.teachers
    return setting.rollout.replicas, a.replicas, b.replicas, setting.ranks


def test_a_replica_of_each_starved_pool_moves_to_the_one_that_limits() -> None:
    found = changes(ONE, limited("train", "rollout", "teacher/a"))
    assert [(words, split(one)) for words, one in found] == [
        ("1 of 3 GPUs of rollout moved to the trainer", (2, 2, 2, 2)),
        ("1 of 2 GPUs of teacher a moved to the trainer", (3, 1, 2, 2)),
        ("1 more GPU for the trainer", (3, 2, 2, 2)),
    ]


def test_a_pool_of_one_replica_gives_none_away() -> None:
    found = changes(ONE, limited("rollout", "train"))
    assert [(words, split(one)) for words, one in found] == [
        ("1 more GPU for rollout", (4, 2, 2, 1))
    ]


def test_a_replica_of_two_gpus_takes_two_of_the_donor() -> None:
    wide = replace(ONE, teachers=(replace(ONE.teachers[0], gpus=2), ONE.teachers[1]))
    (words, one), _ = changes(wide, limited("teacher/a", "rollout"))
    assert (words, split(one)) == ("2 of 3 GPUs of rollout moved to teacher a", (1, 3, 2, 1))


def test_an_external_teacher_gets_no_gpus() -> None:
    outside = replace(ONE, teachers=(replace(ONE.teachers[0], gpus=0), ONE.teachers[1]))
    assert changes(outside, limited("teacher/a", "rollout")) == []


def test_a_run_without_speeds_says_why_there_is_no_prediction(tmp_path: Path) -> None:
    run = read_recorded_run(write_run(tmp_path / "run", without="train/compute_s"))
    assert forecast(run, judge(run)) == (
        "There is no prediction: train/compute_s was not measured."
    )


def test_a_gain_that_would_be_shown_as_none_is_no_forecast(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rates = iter([100.0, 100.4, 100.4, 100.4])
    monkeypatch.setattr(
        "async_opd.tools.report.forecast.steady_state",
        lambda setting: SimpleNamespace(samples_per_s=next(rates)),
    )
    run = read_recorded_run(write_run(tmp_path / "run"))
    said = forecast(run, limited("train", "rollout"))
    assert said == "The plan predicts less than +1% for each change that it knows."


@pytest.mark.slow
def test_a_gpu_for_a_slow_trainer_is_predicted_to_gain(tmp_path: Path) -> None:
    run = read_recorded_run(record(tmp_path / "run", slow_trainer(ONE, 3.0)))
    found = forecast(run, judge(run))
    assert isinstance(found, Forecast)
    assert 0.5 < found.gain < 1.0  # two ranks have 1.9 times the tokens/s of one
