"""Speeds from what a run measured."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from async_opd.config.sections.plan import PlanConfig
from async_opd.core.errors import ConfigError
from async_opd.files.run_format import FORMAT_FILE
from async_opd.tools.plan.inputs import setting_of
from async_opd.tools.plan.measured import (
    MeasuredRun,
    batches_and_tokens,
    fixed_and_slope,
    lengths_of,
    read_run,
)
from async_opd.tools.plan.setting import Lengths
from async_opd.tools.plan.sim.population import draw
from async_opd.tools.plan.sim.simulation import simulate
from tests.tools.plan.runs import BATCH, line, write_run


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> MeasuredRun:
    return read_run(write_run(tmp_path_factory.mktemp("runs") / "run"))


@pytest.fixture
def plan(run: MeasuredRun) -> PlanConfig:
    return run.plan


def test_a_decoding_step_is_fitted_to_the_requests_that_ran(plan: PlanConfig) -> None:
    found = (plan.rollout.step_s, plan.rollout.step_s_per_request)
    assert found == pytest.approx((0.01, 0.001), rel=1e-3)


def test_a_teachers_batch_is_fitted_to_batches_and_tokens(plan: PlanConfig) -> None:
    teacher = plan.teachers["a"]
    assert (teacher.overhead_s, teacher.tokens_per_s) == pytest.approx((0.02, 20_000), rel=1e-3)


def test_a_trainer_with_always_as_many_tokens_takes_time_for_each(plan: PlanConfig) -> None:
    assert plan.train.tokens_per_s == pytest.approx(BATCH * 120 / 0.8, rel=1e-3)
    assert plan.train.overhead_s == 0.0


def test_what_the_trainer_neither_computes_nor_waits_is_its_turnaround(plan: PlanConfig) -> None:
    assert plan.train.turnaround_s == pytest.approx(1 - 0.8 - 0.1 - 0.05 / 2, abs=0.002)


def test_snapshot_sync_and_evaluation_are_as_measured(plan: PlanConfig) -> None:
    assert (plan.train.snapshot_s, plan.train.sync_s, plan.evaluation_s) == (0.05, 0.2, 2.5)


def test_the_rest_of_the_wall_time_is_outside_of_the_steps(plan: PlanConfig) -> None:
    assert plan.outside_s == 40.0


def test_lengths_have_the_measured_mean_and_spread(plan: PlanConfig) -> None:
    lengths = Lengths(plan.response_tokens, plan.response_sigma, 1000)
    drawn = draw(lengths, 200_000, np.random.default_rng(0))
    assert (drawn.mean(), drawn.std()) == pytest.approx((100, 80), rel=0.02)


def test_the_measured_rates_are_those_after_the_warm_up(run: MeasuredRun) -> None:
    assert run.measured.samples_per_s == BATCH
    assert run.measured.busy["train"] == pytest.approx(0.8)


def test_a_calibrated_replica_has_as_many_requests_as_the_real_one(run: MeasuredRun) -> None:
    steps = [line(step) for step in range(1, 61)]
    worked = sum(step["rollout/busy_s"] - step["rollout/paused_s"] for step in steps)
    measured = sum(step["rollout/request_s"] for step in steps) / worked
    found = simulate(setting_of(run.config, run.plan, "config.yaml"))
    assert found.concurrency == pytest.approx(measured, rel=0.05)


@pytest.mark.parametrize("metric", ["rollout/request_s", "teacher/a/batches_per_s"])
def test_a_metric_that_is_missing_is_named(metric: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=metric):
        read_run(write_run(tmp_path / "run", without=metric))


def test_a_run_of_a_few_steps_says_too_little(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="expected 6"):
        read_run(write_run(tmp_path / "run", steps=7))


def test_a_directory_without_metrics_is_no_run(tmp_path: Path) -> None:
    directory = write_run(tmp_path / "run")
    (directory / "metrics.jsonl").unlink()
    with pytest.raises(ConfigError, match="give the directory of a run"):
        read_run(directory)


def test_a_run_that_is_not_over_has_no_wall_time(tmp_path: Path) -> None:
    directory = write_run(tmp_path / "run")
    (directory / "summary.json").unlink()
    assert read_run(directory).measured.wall_s is None


@given(fixed=st.floats(0, 10), slope=st.floats(0, 10), x=st.lists(st.floats(1, 100), min_size=2))
def test_the_fit_keeps_the_total(fixed: float, slope: float, x: list[float]) -> None:
    points = np.array(x)
    y = fixed + slope * points
    found = fixed_and_slope(points, y, np.ones_like(points))
    assert sum(found[0] + found[1] * points) == pytest.approx(sum(y), rel=1e-6, abs=1e-9)
    assert min(found) >= 0


def test_noise_never_makes_a_part_negative() -> None:
    falling = np.array([1.0, 2.0, 3.0]), np.array([3.0, 2.0, 1.0])
    assert fixed_and_slope(*falling, np.ones(3)) == (2.0, 0.0)


def test_a_batch_is_never_all_overhead() -> None:
    batches, tokens = np.array([1.0, 2.0, 4.0]), np.array([100.0, 100.0, 100.0])
    overhead, rate = batches_and_tokens(batches.copy(), batches, tokens)
    assert overhead * batches.sum() + tokens.sum() / rate == pytest.approx(batches.sum())


@pytest.mark.parametrize(("mean", "sigma", "most"), [(50, 0.3, 1000), (300, 1.0, 800)])
def test_lengths_are_found_through_the_cut(mean: float, sigma: float, most: int) -> None:
    drawn = draw(Lengths(mean, sigma, most), 400_000, np.random.default_rng(0))
    found = lengths_of(float(drawn.mean()), float(drawn.std()), most)
    assert (found.mean, found.sigma) == pytest.approx((mean, sigma), rel=0.05)


def test_a_run_directory_of_another_format_is_refused(tmp_path: Path) -> None:
    directory = write_run(tmp_path / "run")
    (directory / FORMAT_FILE).unlink()
    with pytest.raises(ConfigError, match="found no format version"):
        read_run(directory)
