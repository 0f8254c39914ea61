"""Settings whose throughput can be worked out by hand."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from async_opd.tools.plan.setting import Lengths, Setting, mean_length
from async_opd.tools.plan.sim.population import draw
from async_opd.tools.plan.sim.simulation import simulate
from tests.tools.plan.settings import LENGTH, PROMPT, rollouts, setting, teacher

TOKENS = LENGTH + PROMPT
ROLLOUTS_PER_S = 2 * 16 / (LENGTH * 0.01)
TWO = tuple(teacher(name, 1, 8, 0.0, 1000.0, share) for name, share in (("a", 0.8), ("b", 0.2)))
EVALUATED = {"evaluation_every": 1, "evaluation_s": 1e9}
FORMS: dict[str, tuple[dict[str, Any], float, float]] = {
    "when rollouts are slowest every slot decodes all the time": ({}, ROLLOUTS_PER_S, 0.01),
    "a step that grows with its requests has the length of a full one": (
        {"rollout": rollouts(per_request=0.001)}, 2 * 16 / (LENGTH * 0.026), 0.01,
    ),
    "when the trainer is slowest it never waits": (
        {"train_tokens_per_s": 1000.0}, 1000 / TOKENS, 0.01,
    ),
    "a snapshot is time of the trainer": (
        {"train_tokens_per_s": 1000.0, "snapshot_s": 1.0}, 64 / (64 * TOKENS / 1000 + 1.0), 0.01,
    ),
    "when the teacher is slowest it never waits": (
        {"teacher_tokens_per_s": 1000.0, "steps": 200}, 1000 / TOKENS, 0.01,
    ),
    "the overhead of a teacher is shared by full batches": (
        {"teachers": (teacher("a", 1, 8, 0.5, 1e6),), "steps": 200},
        8 / (0.5 + 8 * TOKENS / 1e6), 0.01,
    ),
    "the teacher with the larger share is the limit": (
        {"teachers": TWO, "steps": 600}, 1000 / TOKENS / 0.8, 0.03,
    ),
    "the pause of a replica is lost to it": (
        {"sync_s": 0.5, "steps": 200}, 64 / (64 / ROLLOUTS_PER_S + 0.5), 0.03,
    ),
    "also where syncs are rolling": (
        {"sync_s": 0.5, "rolling": True, "steps": 200}, 64 / (64 / ROLLOUTS_PER_S + 0.5), 0.03,
    ),
    "rollouts share their engines with an evaluation": (
        {"evaluation_every": 1, "evaluation_s": 1.0, "steps": 200},
        64 / (64 / ROLLOUTS_PER_S + 1.0 - 16 / 18),  # 2 answers beside 16 rollouts, for a second
        0.01,
    ),
    "a version that is due during an evaluation has none": (
        {**EVALUATED, "steps": 200}, ROLLOUTS_PER_S * 16 / 18, 0.01,
    ),
    "answers in free slots cost the rollouts the longer steps only": (
        {**EVALUATED, "rollout": rollouts(slots=32, in_flight=8, per_request=0.001)},
        2 * 8 / (LENGTH * 0.019), 0.02,
    ),
    "turnaround leaves places empty": (
        {"rollout": rollouts(turnaround_s=1.0)}, 2 * 16 / (LENGTH * 0.01 + 1.0), 0.02,
    ),
}  # fmt: skip


@pytest.mark.parametrize("form", FORMS)
def test_the_throughput_is_the_closed_form(form: str) -> None:
    given, samples_per_s, within = FORMS[form]
    found = simulate(setting(**given), endless=True)
    assert found.samples_per_s == pytest.approx(samples_per_s, rel=within)


NOISY: dict[str, Any] = {"sigma": 1.0, "steps": 300, "replicas": 1, "slots": 4, "batch_size": 8}
LATE: dict[str, Any] = {"sigma": 0.5, "steps": 200}


@pytest.mark.parametrize(
    ("one", "other", "least", "most"),
    [
        (
            setting(sigma=1.0, steps=200, sync_s=0.1),
            setting(sigma=1.0, steps=200, sync_s=0.1, on_sync="finish"),
            0.0,
            0.9,
        ),
        (setting(**NOISY), setting(**NOISY, n=4), 0.9, 2.0),
        (
            setting(**LATE, rollout=rollouts(turnaround_s=0.1)),
            setting(**LATE, rollout=rollouts(turnaround_s=0.1, in_flight=24)),
            1.05,
            2.0,
        ),
    ],
    ids=[
        "draining for a sync costs more than freezing",
        "a group costs no slots while its longest rollout runs",
        "requests that wait in the engine hide the turnaround",
    ],
)
def test_one_setting_is_faster(one: Setting, other: Setting, least: float, most: float) -> None:
    rates = [simulate(case, endless=True).samples_per_s for case in (one, other)]
    assert least < rates[1] / rates[0] < most


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
