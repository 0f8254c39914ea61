"""Automatic weights of teachers: by which gaps and tokens, their bounds, and repeatable steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from async_opd.config.sections.loss import Reduction
from async_opd.config.sections.train import TrainConfig
from async_opd.core.errors import StageError
from async_opd.core.samples import Sample
from tests.trainer import two_tasks
from tests.trainer.models import headers_of, new_rank, random_sample, tiny_model
from trainer.batches.balance import (
    LARGEST_RATIO,
    SMALLEST_GAP,
    SMOOTHED,
    Balance,
    Balancing,
    TeacherStats,
    masses_of,
)
from trainer.batches.token_weights import TokenWeighting
from trainer.learner import Learner

AUTO = TokenWeighting(auto=True)


def of(teacher: str, index: int, size: int) -> Sample:
    made = random_sample(index, size, k=6)
    prompt = replace(made.rollout.prompt, teacher=teacher)
    return replace(made, rollout=replace(made.rollout, prompt=prompt))


def batch(step: int) -> list[Sample]:
    """Three samples of teacher a, which has most tokens, and two of b; of step 2 none of b."""
    made = [of("a", 10 * step + i, 7 + i) for i in range(3)]
    return made if step == 2 else [*made, *(of("b", 10 * step + i, 1) for i in (4, 5))]


def learner(weighting: TokenWeighting = AUTO, **train: Any) -> Learner:
    config = TrainConfig.model_validate({"lr": 1e-2, "warmup_steps": 0, "steps": 50, **train})
    rank = new_rank(tiny_model(), config)
    return Learner(rank, weighting)


def weights_of(metrics: dict[str, float]) -> dict[str, float]:
    return {key: value for key, value in metrics.items() if key.endswith("/weight")}


def seen(mass: float, gap: float, first: float) -> TeacherStats:
    return TeacherStats(SMOOTHED, mass, SMOOTHED, gap, first)


# ── the weights ────────────────────────────────────────────────────────────────────────────────


def test_before_any_gap_is_known_all_teachers_have_the_same_share_of_the_weights() -> None:
    found = Balance().with_masses({"a": 0.9, "b": 0.1}).weights()
    assert found == pytest.approx({"a": 0.5 / 0.9, "b": 0.5 / 0.1})


def test_a_token_weighs_by_the_share_of_the_gap_that_is_left_by_mass_and_first_gap() -> None:
    found = Balance({"a": seen(0.8, 0.5, 2.0), "b": seen(0.2, 0.5, 0.5)}).weights()
    assert found["b"] / found["a"] == pytest.approx((1.0 / (0.2 * 0.5)) / (0.25 / (0.8 * 2.0)))


def test_a_gap_that_is_noise_is_a_sixteenth_of_the_largest_and_a_grown_one_the_first() -> None:
    found = Balance({"a": seen(0.5, 3.2, 3.2), "b": seen(0.5, -1e-3, -1e-3)}).weights()
    assert found["b"] / found["a"] == pytest.approx(SMALLEST_GAP / SMALLEST_GAP)
    grown = Balance({"a": seen(0.5, 9.0, 1.0), "b": seen(0.5, 1.0, 1.0)}).weights()
    assert grown == pytest.approx({"a": 1.0, "b": 1.0})


def test_a_teacher_without_a_gap_yet_counts_with_the_mean_first_gap_of_the_others() -> None:
    known = Balance({"a": seen(0.25, 1.0, 1.0), "b": seen(0.25, 3.0, 3.0)})
    found = known.with_masses({"c": 1.0}).weights()
    mass = known.with_masses({"c": 1.0}).seen
    assert found["c"] / found["a"] == pytest.approx(mass["a"].mass / (mass["c"].mass * 2.0))


SEEN = st.builds(seen, st.floats(1e-4, 1.0), st.floats(-1.0, 20.0), st.floats(-1.0, 20.0))


@given(st.dictionaries(st.sampled_from("abcde"), SEEN, min_size=1))
def test_weights_are_bounded_and_one_in_the_mean(known: dict[str, TeacherStats]) -> None:
    found = Balance(known).weights()
    assert max(found.values()) <= min(found.values()) * LARGEST_RATIO * (1 + 1e-9)
    masses = sum(one.mass for one in known.values())
    assert sum(found[n] * known[n].mass for n in found) / masses == pytest.approx(1.0)


def test_gap_and_mass_are_means_of_the_first_steps_and_exponential_ones_from_then_on() -> None:
    one = TeacherStats()
    for step in range(SMOOTHED):
        one = one.with_gap(float(step)).with_mass(float(step % 2))
    mean = (SMOOTHED - 1) / 2
    assert (one.gap, one.first, one.mass) == pytest.approx((mean, mean, 0.5))
    later = one.with_gap(mean + 1.0)
    assert (later.gap, later.first) == pytest.approx((mean + 1 / SMOOTHED, mean))


def test_a_gap_that_is_not_finite_is_left_out() -> None:
    known = Balance().with_masses({"a": 0.5, "b": 0.5})
    found = known.with_gaps({"teacher/a/gap": float("inf"), "teacher/b/gap": 2.0})
    assert (found.seen["a"].gaps, found.seen["b"].gap) == (0, 2.0)


@given(st.dictionaries(st.sampled_from("abcde"), SEEN))
def test_what_a_checkpoint_has_of_it_is_exact(known: dict[str, TeacherStats]) -> None:
    assert Balance.of(Balance(known).text()) == Balance(known)


# ── the factors of a batch ─────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("reduction", get_args(Reduction))
def test_factors_make_the_weights_those_of_the_reduction(reduction: Reduction) -> None:
    headers = headers_of([*batch(1), of("a", 9, 0)])
    weighting = TokenWeighting(reduction=reduction, max_tokens=16, auto=True)
    balancing = Balancing(weighting)
    factors = balancing.factors(headers)
    weights = {key.split("/")[1]: value for key, value in balancing.trained({}, "").items()}
    expected = replace(weighting, teachers=weights)(headers)[0]
    for header, planned, wanted in zip(headers, weighting(headers)[0], expected, strict=True):
        if header.response_tokens:
            assert planned.weight * factors.get(header.uid, 1.0) == pytest.approx(wanted.weight)


def test_the_first_steps_weights_give_all_teachers_the_same_sum() -> None:
    for reduction in get_args(Reduction):
        weighting = TokenWeighting(reduction=reduction, max_tokens=16, auto=True)
        headers = headers_of(batch(1))
        factors = Balancing(weighting).factors(headers)
        planned = weighting(headers)[0]
        scaled = [
            one.weight * factors.get(header.uid, 1.0)
            for one, header in zip(planned, headers, strict=True)
        ]
        assert masses_of(headers, scaled) == pytest.approx({"a": 0.5, "b": 0.5})


def test_without_auto_there_are_no_factors_and_no_metrics() -> None:
    balancing = Balancing(TokenWeighting())
    assert balancing.factors(headers_of(batch(1))) == {}
    assert balancing.trained({"teacher/a/gap": 1.0}, "") == {}
    assert balancing.balance.text() == ""


@pytest.mark.parametrize(("fault", "steps"), [("", 1), ("the loss is not finite", 0)])
def test_the_gaps_of_a_skipped_step_are_not_taken(fault: str, steps: int) -> None:
    balancing = Balancing(TokenWeighting(auto=True))
    balancing.factors(headers_of(batch(1)))
    balancing.trained({"teacher/a/gap": 1.0, "teacher/b/gap": 3.0}, fault)
    assert [balancing.balance.seen[name].gaps for name in "ab"] == [steps, steps]


# ── steps ──────────────────────────────────────────────────────────────────────────────────────


def trained(made: Learner, steps: Sequence[int]) -> list[dict[str, float]]:
    metrics = [made.train_batch(batch(step)).metrics for step in steps]
    return [
        {key: value for key, value in one.items() if not key.startswith("train/")}
        for one in metrics
    ]


def test_the_loss_of_a_step_has_the_weights_that_its_metrics_say() -> None:
    metrics = learner().train_batch(batch(1)).metrics
    losses, shares = (
        {name: metrics[f"teacher/{name}/{key}"] for name in "ab"} for key in ("loss", "token_share")
    )
    weights = {name: metrics[f"teacher/{name}/weight"] for name in "ab"}
    total = sum(weights[name] * shares[name] * losses[name] for name in "ab")
    assert metrics["loss/total"] == pytest.approx(total, rel=1e-5)


def test_a_learner_that_goes_back_to_a_checkpoint_makes_the_same_steps(tmp_path: Path) -> None:
    made = learner()
    trained(made, [1, 2])
    made.capture(0)
    made.write(str(tmp_path))
    expected, after = trained(made, [3, 4]), dict(made.named_weights())
    again = learner()
    again.restore(str(tmp_path))
    assert trained(again, [3, 4]) == expected
    assert all(torch.equal(after[name], tensor) for name, tensor in again.named_weights())
    assert len(weights_of(expected[0])) == 2


def test_a_skipped_step_leaves_the_gaps_as_they_were() -> None:
    made = learner(on_nonfinite="skip")
    trained(made, [1])
    before = {name: one.gaps for name, one in made._balancing.balance.seen.items()}
    broken = batch(2)
    broken[0].scores.sampled_logprobs[0] = float("nan")
    assert made.train_batch(broken).skipped
    assert {name: one.gaps for name, one in made._balancing.balance.seen.items()} == before


def test_a_step_that_fails_leaves_the_balance_as_it_was() -> None:
    made, other = learner(), learner()
    for one in (made, other):
        trained(one, [1])
    broken = batch(2)
    broken[0].scores.sampled_logprobs[0] = float("nan")
    with pytest.raises(StageError):
        made.train_batch(broken)
    assert trained(made, [3]) == trained(other, [3])


@pytest.mark.slow
def test_the_task_with_few_tokens_starves_without_auto_and_the_other_is_not_harmed_by_it() -> None:
    plain, auto = (two_tasks.distilled(TokenWeighting(auto=one)) for one in (False, True))
    assert plain["short"] < 0.5
    assert auto["short"] >= 0.8
    assert auto["long"] >= max(0.8, plain["long"] - 0.05)
