"""Settings whose throughput can be worked out by hand."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from async_opd.tools.plan.setting import Lengths, mean_length
from async_opd.tools.plan.sim.population import draw
from async_opd.tools.plan.sim.simulation import simulate
from tests.tools.plan.settings import LENGTH, PROMPT, rollouts, setting, teacher

TOKENS = LENGTH + PROMPT
ROLLOUTS_PER_S = 2 * 16 / (LENGTH * 0.01)


def test_when_rollouts_are_slowest_every_slot_decodes_all_the_time() -> None:
    found = simulate(setting(), endless=True)
    assert found.samples_per_s == pytest.approx(ROLLOUTS_PER_S, rel=0.01)


def test_a_step_that_grows_with_its_requests_has_the_length_of_a_full_one() -> None:
    pool = rollouts(per_request=0.001)
    found = simulate(setting(rollout=pool), endless=True)
    assert found.samples_per_s == pytest.approx(2 * 16 / (LENGTH * 0.026), rel=0.01)


def test_when_the_trainer_is_slowest_it_never_waits() -> None:
    found = simulate(setting(train_tokens_per_s=1000.0), endless=True)
    assert found.samples_per_s == pytest.approx(1000 / TOKENS, rel=0.01)


def test_a_snapshot_is_time_of_the_trainer() -> None:
    found = simulate(setting(train_tokens_per_s=1000.0, snapshot_s=1.0), endless=True)
    version_s = 2 * 32 * TOKENS / 1000 + 1.0
    assert found.samples_per_s == pytest.approx(64 / version_s, rel=0.01)


def test_when_the_teacher_is_slowest_it_never_waits() -> None:
    found = simulate(setting(teacher_tokens_per_s=1000.0, steps=200), endless=True)
    assert found.samples_per_s == pytest.approx(1000 / TOKENS, rel=0.01)


def test_the_overhead_of_a_teacher_is_shared_by_full_batches() -> None:
    slow = teacher("a", 1, 8, 0.5, 1e6)
    found = simulate(setting(teachers=(slow,), steps=200), endless=True)
    assert found.samples_per_s == pytest.approx(8 / (0.5 + 8 * TOKENS / 1e6), rel=0.01)


def test_the_teacher_with_the_larger_share_is_the_limit() -> None:
    teachers = tuple(
        teacher(name, 1, 8, 0.0, 1000.0, share) for name, share in (("a", 0.8), ("b", 0.2))
    )
    found = simulate(setting(teachers=teachers, steps=600), endless=True)
    assert found.samples_per_s == pytest.approx(1000 / TOKENS / 0.8, rel=0.03)


def test_on_policy_one_stage_works_after_the_other() -> None:
    synchronous = setting(
        sync_steps=1,
        staleness_threshold=0.0,
        teacher_tokens_per_s=2000.0,
        train_tokens_per_s=1000.0,
        snapshot_s=0.25,
        sync_s=0.5,
    )
    rollout_s, score_s, train_s = LENGTH * 0.01, 32 * TOKENS / 2000, 32 * TOKENS / 1000
    found = simulate(synchronous)
    assert found.samples_per_s == pytest.approx(32 / (rollout_s + score_s + train_s + 0.75))


@pytest.mark.parametrize("rolling", [False, True])
def test_the_pause_of_a_replica_is_lost_to_it(rolling: bool) -> None:
    found = simulate(setting(sync_s=0.5, rolling=rolling, steps=200), endless=True)
    version_s = 64 / ROLLOUTS_PER_S + 0.5
    assert found.samples_per_s == pytest.approx(64 / version_s, rel=0.03)


def test_rollouts_share_their_engines_with_an_evaluation() -> None:
    found = simulate(setting(evaluation_every=1, evaluation_s=1.0, steps=200), endless=True)
    version_s = 64 / ROLLOUTS_PER_S + 1.0 - 16 / 18  # 2 answers beside 16 rollouts, for a second
    assert found.samples_per_s == pytest.approx(64 / version_s, rel=0.01)


def test_a_version_that_is_due_during_an_evaluation_has_none() -> None:
    found = simulate(setting(evaluation_every=1, evaluation_s=1e9, steps=200), endless=True)
    assert found.samples_per_s == pytest.approx(ROLLOUTS_PER_S * 16 / 18, rel=0.01)


def test_answers_in_free_slots_cost_the_rollouts_the_longer_steps_only() -> None:
    few = rollouts(slots=32, in_flight=8, per_request=0.001)
    found = simulate(setting(rollout=few, evaluation_every=1, evaluation_s=1e9), endless=True)
    assert found.samples_per_s == pytest.approx(2 * 8 / (LENGTH * 0.019), rel=0.02)


def test_draining_for_a_sync_costs_more_than_freezing() -> None:
    frozen = setting(sigma=1.0, steps=200, sync_s=0.1)
    drained = replace(frozen, on_sync="finish")
    rates = [simulate(case, endless=True).samples_per_s for case in (frozen, drained)]
    assert rates[1] < 0.9 * rates[0]


def test_a_group_costs_no_slots_while_its_longest_rollout_runs() -> None:
    single = setting(replicas=1, slots=4, sigma=1.0, steps=300, batch_size=8)
    grouped = replace(single, rollout=replace(single.rollout, n=4))
    rates = [simulate(case, endless=True).samples_per_s for case in (single, grouped)]
    assert rates[1] > 0.9 * rates[0]


def test_requests_that_wait_in_the_engine_hide_the_turnaround() -> None:
    plain = setting(rollout=rollouts(turnaround_s=0.1), sigma=0.5, steps=200)
    more = replace(plain, rollout=replace(plain.rollout, in_flight=24))
    rates = [simulate(case, endless=True).samples_per_s for case in (plain, more)]
    assert rates[1] > 1.05 * rates[0]


def test_turnaround_leaves_places_empty() -> None:
    found = simulate(setting(rollout=rollouts(turnaround_s=1.0)), endless=True)
    assert found.samples_per_s == pytest.approx(2 * 16 / (LENGTH * 0.01 + 1.0), rel=0.02)


def test_the_wall_time_is_that_of_the_steps_and_of_what_is_around_them() -> None:
    found = simulate(setting(train_tokens_per_s=1000.0, outside_s=30.0))
    assert found.seconds == pytest.approx(60 * 32 * TOKENS / 1000, rel=0.02)
    assert found.wall_s == found.seconds + 30.0


def test_the_limits_are_the_closed_forms() -> None:
    limits = setting(train_tokens_per_s=1000.0, teacher_tokens_per_s=2000.0).limits()
    assert limits == pytest.approx({"rollout": 32.0, "teacher/a": 2000 / 120, "train": 1000 / 120})


@pytest.mark.parametrize(("sigma", "most"), [(0.0, 50), (0.5, 150), (1.0, 1000), (1.5, 120)])
def test_the_mean_of_cut_lengths_is_that_of_many(sigma: float, most: int) -> None:
    lengths = Lengths(100, sigma, most)
    drawn = draw(lengths, 400_000, np.random.default_rng(0))
    assert mean_length(lengths) == pytest.approx(drawn.mean(), rel=0.01)


def test_many_lengths_are_distributed_as_single_ones() -> None:
    import random

    lengths, single = Lengths(100, 1.0, 400), random.Random(0)
    drawn = draw(lengths, 50_000, np.random.default_rng(0))
    one_by_one = [lengths.sample(single) for _ in range(50_000)]
    levels = [10, 50, 90, 99]
    assert np.percentile(drawn, levels) == pytest.approx(
        np.percentile(one_by_one, levels), rel=0.05
    )
