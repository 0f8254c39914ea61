"""Speeds from what a run measured."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

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


def test_the_plan_has_the_speeds_that_the_run_was_made_with(run: MeasuredRun) -> None:
    plan, one = run.plan, run.plan.teachers["a"]
    decoding = (plan.rollout.step_s, plan.rollout.step_s_per_request)
    assert decoding == pytest.approx((0.01, 0.001), rel=1e-3)
    assert (one.overhead_s, one.tokens_per_s) == pytest.approx((0.02, 20_000), rel=1e-3)
    assert plan.train.tokens_per_s == pytest.approx(BATCH * 120 / 0.8, rel=1e-3)
    assert plan.train.overhead_s == 0.0  # its steps have always as many tokens
    assert plan.train.turnaround_s == pytest.approx(1 - 0.8 - 0.1 - 0.05 / 2, abs=0.002)
    assert (plan.train.snapshot_s, plan.train.sync_s, plan.evaluation_s) == (0.05, 0.2, 2.5)
    assert plan.outside_s == 40.0
    lengths = Lengths(plan.response_tokens, plan.response_sigma, 1000)
    drawn = draw(lengths, 200_000, np.random.default_rng(0))
    assert (drawn.mean(), drawn.std()) == pytest.approx((100, 80), rel=0.02)
    assert run.measured.samples_per_s == BATCH
    assert run.measured.busy["train"] == pytest.approx(0.8)


def test_a_calibrated_replica_has_as_many_requests_as_the_real_one(run: MeasuredRun) -> None:
    steps = [line(step) for step in range(1, 61)]
    worked = sum(step["rollout/busy_s"] - step["rollout/paused_s"] for step in steps)
    measured = sum(step["rollout/request_s"] for step in steps) / worked
    found = simulate(setting_of(run.config, run.plan, "config.yaml"))
    assert found.concurrency == pytest.approx(measured, rel=0.05)


@pytest.mark.parametrize(
    ("steps", "without", "gone", "cause"),
    [
        (60, "rollout/request_s", "", "rollout/request_s"),
        (60, "teacher/a/batches_per_s", "", "teacher/a/batches_per_s"),
        (7, "", "", "expected 6"),
        (60, "", "metrics.jsonl", "give the directory of a run"),
        (60, "", FORMAT_FILE, "found no format version"),
        (60, "", "summary.json", None),
    ],
    ids=["a metric", "another", "few steps", "no metrics", "another format", "not over"],
)
def test_a_run_without_what_is_needed_is_refused(
    steps: int, without: str, gone: str, cause: str | None, tmp_path: Path
) -> None:
    directory = write_run(tmp_path / "run", steps, without)
    if gone:
        (directory / gone).unlink()
    if cause is None:
        assert read_run(directory).measured.wall_s is None
        return
    with pytest.raises(ConfigError, match=cause):
        read_run(directory)


@given(fixed=st.floats(0, 10), slope=st.floats(0, 10), x=st.lists(st.floats(1, 100), min_size=2))
def test_the_fit_keeps_the_total(fixed: float, slope: float, x: list[float]) -> None:
    points = np.array(x)
    y = fixed + slope * points
    found = fixed_and_slope(points, y, np.ones_like(points))
    assert sum(found[0] + found[1] * points) == pytest.approx(sum(y), rel=1e-6, abs=1e-9)
    assert min(found) >= 0
    falling = np.array([1.0, 2.0, 3.0]), np.array([3.0, 2.0, 1.0])
    assert fixed_and_slope(*falling, np.ones(3)) == (2.0, 0.0)  # noise makes no part negative


def test_a_batch_is_never_all_overhead() -> None:
    batches, tokens = np.array([1.0, 2.0, 4.0]), np.array([100.0, 100.0, 100.0])
    overhead, rate = batches_and_tokens(batches.copy(), batches, tokens)
    assert overhead * batches.sum() + tokens.sum() / rate == pytest.approx(batches.sum())


@pytest.mark.parametrize(("mean", "sigma", "most"), [(50, 0.3, 1000), (300, 1.0, 800)])
def test_lengths_are_found_through_the_cut(mean: float, sigma: float, most: int) -> None:
    drawn = draw(Lengths(mean, sigma, most), 400_000, np.random.default_rng(0))
    found = lengths_of(float(drawn.mean()), float(drawn.std()), most)
    assert (found.mean, found.sigma) == pytest.approx((mean, sigma), rel=0.05)
