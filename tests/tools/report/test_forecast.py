"""The planner's question for each verdict, and that its answer is a gain."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from async_opd.tools.plan.setting import Setting
from async_opd.tools.report.forecast import NO_GAIN, Forecast, changes, forecast
from async_opd.tools.report.recorded_run import read_recorded_run
from async_opd.tools.report.verdict import Verdict, judge
from tests.tools.plan.runs import write_run
from tests.tools.report.simulated import record
from tests.tools.report.test_verdict import balanced, slow_trainer
from tests.world.cli import Cli

ONE = balanced(3, 8, 16)


def limited(pool: str, *starved: str) -> Verdict:
    return Verdict("pool", "", (), "", pool, starved)


def split(setting: Setting) -> tuple[int, int, int, int]:
    a, b = setting.teachers
    return setting.rollout.replicas, a.replicas, b.replicas, setting.ranks


A, B = ONE.teachers
WIDE = replace(ONE, teachers=(replace(A, gpus=2), B))
OUTSIDE = replace(ONE, teachers=(replace(A, gpus=0), B))


@pytest.mark.parametrize(
    ("setting", "verdict", "found"),
    [
        (
            ONE,
            limited("train", "rollout", "teacher/a"),
            [
                ("1 of 3 GPUs of rollout moved to the trainer", (2, 2, 2, 2)),
                ("1 of 2 GPUs of teacher a moved to the trainer", (3, 1, 2, 2)),
                ("1 more GPU for the trainer", (3, 2, 2, 2)),
            ],
        ),
        (ONE, limited("rollout", "train"), [("1 more GPU for rollout", (4, 2, 2, 1))]),
        (
            WIDE,
            limited("teacher/a", "rollout"),
            [
                ("2 of 3 GPUs of rollout moved to teacher a", (1, 3, 2, 1)),
                ("2 more GPUs for teacher a", (3, 3, 2, 1)),
            ],
        ),
        (OUTSIDE, limited("teacher/a", "rollout"), []),
    ],
    ids=["one of each starved pool", "the only replica stays", "two GPUs", "an external teacher"],
)
def test_replicas_of_starved_pools_move_to_the_one_that_limits(
    setting: Setting, verdict: Verdict, found: list[tuple[str, tuple[int, ...]]]
) -> None:
    assert [(words, split(one)) for words, one in changes(setting, verdict)] == found


@pytest.mark.slow
def test_without_speeds_or_a_gain_to_show_there_is_no_forecast(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bare = read_recorded_run(write_run(tmp_path / "bare", without="train/compute_s"))
    words = forecast(bare, judge(bare))
    assert words == "There is no prediction: train/compute_s was not measured."
    rates = iter([100.0, 100.4, 100.4, 100.4])
    monkeypatch.setattr(
        "async_opd.tools.report.forecast.steady_state",
        lambda setting: SimpleNamespace(samples_per_s=next(rates)),
    )
    run = read_recorded_run(write_run(tmp_path / "run"))
    words = forecast(run, limited("train", "rollout"))
    assert words == NO_GAIN


@pytest.mark.slow
def test_no_change_is_recommended_that_the_plan_finds_useless(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cli: Cli
) -> None:
    write_run(tmp_path / "run")
    budget = Verdict("budget", "They take turns.", (), "Raise async.staleness_threshold.")
    monkeypatch.setattr("async_opd.tools.report.verdict.judge", lambda run: budget)
    monkeypatch.setattr("async_opd.tools.report.forecast.forecast", lambda *_: NO_GAIN)
    printed = cli("report", tmp_path / "run")
    assert printed.out.splitlines()[:3] == [
        *("They take turns.", "Nothing needs to change.", NO_GAIN)
    ]
    assert "Raise async" not in (tmp_path / "run" / "report.html").read_text()


def test_too_few_steps_for_a_forecast_are_a_sentence(tmp_path: Path) -> None:
    run = read_recorded_run(write_run(tmp_path / "run", steps=7))
    words = forecast(run, limited("train", "rollout"))
    assert str(words).startswith("There is no prediction: metrics.jsonl has ")


@pytest.mark.slow
def test_a_gpu_for_a_slow_trainer_is_predicted_to_gain(tmp_path: Path) -> None:
    run = read_recorded_run(record(tmp_path / "run", slow_trainer(ONE, 3.0)))
    found = forecast(run, judge(run))
    assert isinstance(found, Forecast)
    assert 0.5 < found.gain < 1.0  # two ranks have 1.9 times the tokens/s of one
