"""What tokens weigh: reductions, advantages, and that neither depends on the split."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, get_args

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from async_opd.config.sections.loss import ForwardKLConfig, Reduction, RewardConfig
from async_opd.config.sections.train import TrainConfig
from async_opd.core.errors import StageError
from async_opd.core.samples import Sample
from tests.trainer.models import headers_of, kept_gradients, random_sample, tiny_model
from trainer.batches.token_weights import TokenWeighting, advantages, groups_of, token_weights
from trainer.learner import Learner
from trainer.losses import build_objective
from trainer.rank import Rank
from trainer.student.placed import PlacedStudent

LENGTHS = [5, 1, 0, 3]


@pytest.mark.parametrize(
    ("reduction", "expected"),
    [
        ("token_mean", [1 / 9] * 4),
        ("seq_mean_token_mean", [1 / 15, 1 / 3, 1 / 3, 1 / 9]),
        ("seq_mean_token_sum", [1 / 3] * 4),
        ("seq_mean_token_sum_norm", [1 / 60] * 4),
    ],
)
def test_each_reduction_has_its_denominator(reduction: Reduction, expected: list[float]) -> None:
    assert token_weights(LENGTHS, reduction, 20) == pytest.approx(expected)


@given(st.lists(st.integers(0, 50), max_size=20), st.floats(0.01, 100))
def test_teachers_of_equal_weight_change_nothing(lengths: list[int], weight: float) -> None:
    for reduction in get_args(Reduction):
        equal = token_weights([1, *lengths], reduction, 7, [weight] * (len(lengths) + 1))
        assert equal == pytest.approx(token_weights([1, *lengths], reduction, 7))


@given(st.lists(st.tuples(st.integers(0, 50), st.floats(0.01, 100)), max_size=20))
def test_weighted_means_weigh_one_in_all(pairs: list[tuple[int, float]]) -> None:
    lengths, own = [length for length, _ in pairs], [weight for _, weight in pairs]
    for reduction in ("token_mean", "seq_mean_token_mean"):
        weights = token_weights(lengths, reduction, 1, own)
        total = sum(w * n for w, n in zip(weights, lengths, strict=True))
        assert total == pytest.approx(float(any(lengths)))


def with_reward(index: int, group: int, reward: float | None, k: int = 6) -> Sample:
    sample = random_sample(index, 1 + index % 4, k=k)
    rollout = replace(sample.rollout, uid=f"e0/p{group}/{index}", reward=reward)
    return replace(sample, rollout=rollout)


def batch(rewards: Sequence[float | None] = (1, 0, 0, 1, 1, 1)) -> list[Sample]:
    """Groups of three."""
    return [with_reward(index, index // 3, reward) for index, reward in enumerate(rewards)]


def test_advantages_are_standardized_within_the_group_or_keep_their_scale() -> None:
    groups = groups_of(headers_of(batch()))
    assert groups == [[0, 1, 2], [3, 4, 5]]  # of one uid up to its last part
    s, t = np.std([1, 0, 0]), np.std([5, 7, 6])
    expected = [(2 / 3) / s, (-1 / 3) / s, (-1 / 3) / s, -1 / t, 1 / t, 0]
    assert advantages([1, 0, 0, 5, 7, 6], groups, "std") == pytest.approx(expected)
    assert advantages([4, 0], [[0, 1]], "none") == [2, -2]
    assert advantages([0.6, 0.601], [[0, 1]], "std") == pytest.approx([-1, 1])


@pytest.mark.parametrize("normalize", ["std", "none"])
@pytest.mark.parametrize("odd", [0.1 + 0.2 + 0.3, float(np.float32(0.6)), 0.6 - 1e-7, 0.6])
def test_rewards_equal_up_to_rounding_have_no_advantage(odd: float, normalize: Any) -> None:
    assert advantages([odd, 0.6, 0.6, 0.6], [[0, 1, 2, 3]], normalize) == [0, 0, 0, 0]


@given(st.floats(0, 1e6), st.lists(st.floats(-1e-7, 1e-7), min_size=2, max_size=8))
def test_a_spread_within_rounding_is_flat_at_any_scale(reward: float, errors: list[float]) -> None:
    rewards = [reward * (1 + error) for error in errors]
    flat = [advantages(rewards, [range(len(rewards))], how) for how in ("std", "none")]
    assert flat == [[0.0] * len(rewards)] * 2


@given(st.lists(st.floats(-5, 5), min_size=2, max_size=8))
def test_advantages_of_a_group_sum_to_nothing(rewards: list[float]) -> None:
    found = advantages(rewards, [range(len(rewards))], "none")
    assert sum(found) == pytest.approx(0, abs=1e-9)


@pytest.mark.parametrize("reward", [None, float("nan"), float("inf")])
def test_a_sample_without_a_reward_is_refused_with_its_uid(reward: float | None) -> None:
    with pytest.raises(StageError, match="e0/p0/1 has reward"):
        TokenWeighting(reward_weight=1.0)(headers_of(batch((1, reward, 0))))


@pytest.mark.parametrize("rewards", [(1, 0, 0, 1, 1, 1), (0.1 + 0.2 + 0.3, 0.6, 0.6, 1, 0, 0)])
def test_metrics_tell_what_the_rewards_were_like(rewards: Sequence[float]) -> None:
    """Without a reward there are none."""
    metrics = TokenWeighting(reward_weight=1.0)(headers_of(batch(rewards)))[1]
    assert metrics["reward/mean"] == pytest.approx(sum(rewards) / 6)
    assert metrics["reward/flat_groups"] == 0.5
    assert TokenWeighting()(headers_of(batch((None, None))))[1] == {}


# ── in the learner ─────────────────────────────────────────────────────────────────────────────

Gradients = dict[str, torch.Tensor]


def gradients(
    samples: list[Sample],
    budget: int,
    reward: RewardConfig | None = None,
    teachers: dict[str, float] | None = None,
    **loss: Any,
) -> tuple[Gradients, dict[str, float]]:
    """The gradients a step would have used, and its metrics; float64."""
    config = ForwardKLConfig(**loss)
    train = TrainConfig(tokens_per_micro_batch=budget, max_grad_norm=1e9)
    objective = build_objective(config, reward)
    rank = Rank(PlacedStudent(tiny_model().double(), objective, train, torch.device("cpu")))
    kept = kept_gradients(rank)
    made = Learner(rank, TokenWeighting.of(config, reward, 20, teachers))
    return kept, made.train_batch(samples).metrics


def close(one: Gradients, other: Gradients) -> bool:
    """The model's norms compute in float32, whatever the weights are."""
    return all(torch.allclose(one[name], other[name], atol=1e-6) for name in one)


@pytest.mark.parametrize("reward", [None, RewardConfig(weight=0.7)])
@pytest.mark.parametrize("reduction", get_args(Reduction))
def test_no_reduction_depends_on_the_split(reduction: Any, reward: RewardConfig | None) -> None:
    samples = [*batch(), random_sample(9, 0, k=6)] if reward is None else batch()
    whole, metrics = gradients(samples, 10**6, reward, reduction=reduction)
    split, others = gradients(samples[::-1], 5, reward, reduction=reduction)
    assert close(whole, split)
    assert metrics["loss/total"] == pytest.approx(others["loss/total"])


TEACHERS = {"a": 3.0, "b": 0.5}


def of_two_teachers(rewards: Sequence[float | None] = (None,) * 4) -> list[Sample]:
    """Samples of teachers a and b in turn."""
    made = []
    for index, sample in enumerate(batch(rewards)):
        prompt = replace(sample.rollout.prompt, teacher="ab"[index % 2])
        made.append(replace(sample, rollout=replace(sample.rollout, prompt=prompt)))
    return made


@pytest.mark.parametrize("reduction", get_args(Reduction))
def test_teachers_weights_make_weighted_means(reduction: Any) -> None:
    """Against the gradients of the samples one by one, in float64."""
    samples = of_two_teachers()
    own = [TEACHERS[s.rollout.prompt.teacher] for s in samples]
    sizes = [len(s.rollout.response_ids) for s in samples]
    factors = {
        "token_mean": [a * n for a, n in zip(own, sizes, strict=True)],
        "seq_mean_token_mean": own,
        "seq_mean_token_sum": own,
        "seq_mean_token_sum_norm": own,
    }[reduction]
    total = sum(factors)
    alone = [gradients([s], 10**6, reduction=reduction)[0] for s in samples]
    expected = {
        name: sum(f / total * one[name] for f, one in zip(factors, alone, strict=True))
        for name in alone[0]
    }
    found, _ = gradients(samples, 10**6, teachers=TEACHERS, reduction=reduction)
    assert close(found, expected)


def test_rewards_take_no_teachers_weight() -> None:
    samples = [
        replace(s, scores=random_sample(i, 1 + i % 4).scores)
        for i, s in enumerate(of_two_teachers((1, 0, 0, 1, 1, 0)))
    ]
    weighted, _ = gradients(samples, 10**6, RewardConfig(), teachers=TEACHERS, weight=0)
    plain, _ = gradients(samples, 10**6, RewardConfig(), weight=0)
    assert close(weighted, plain)


def test_weights_mix_distillation_and_reward() -> None:
    distilled, _ = gradients(batch(), 10**6)
    rewarded, _ = gradients(batch(), 10**6, RewardConfig(), weight=0)
    mixed, _ = gradients(batch(), 10**6, RewardConfig(weight=0.5), weight=2)
    expected = {name: 2 * distilled[name] + 0.5 * rewarded[name] for name in mixed}
    assert close(mixed, expected)


def test_the_reward_alone_trains_on_sampled_token_scores() -> None:
    samples = [with_reward(i, i // 3, r, k=0) for i, r in enumerate((1, 0, 0, 1, 1, 0))]
    kept, metrics = gradients(samples, 10**6, RewardConfig(), weight=0)
    assert metrics["loss/distillation"] == 0
    assert max(float(g.abs().max()) for g in kept.values()) > 0


# ── responses that were cut off are left out: of losses, denominators and groups ───────────────

MASKED = RewardConfig(mask_truncated=True)


def truncated(cut: Sequence[int], rewards: Sequence[float] = (1, 0, 0, 1, 1, 0)) -> list[Sample]:
    """Two groups of three; those at ``cut`` were cut off."""
    samples = [with_reward(index, index // 3, reward) for index, reward in enumerate(rewards)]
    return [
        replace(s, rollout=replace(s.rollout, finish_reason="length")) if i in cut else s
        for i, s in enumerate(samples)
    ]


def without(samples: Sequence[Sample], cut: Sequence[int]) -> list[Sample]:
    return [sample for index, sample in enumerate(samples) if index not in cut]


@pytest.mark.parametrize("reduction", get_args(Reduction))
def test_a_masked_batch_has_the_gradient_of_the_others_alone(reduction: Any) -> None:
    cut = (1, 3)
    masked, metrics = gradients(truncated(cut), 10**6, reduction=reduction, mask_truncated=True)
    alone, others = gradients(without(truncated(cut), cut), 10**6, reduction=reduction)
    assert close(masked, alone)
    assert metrics["loss/total"] == pytest.approx(others["loss/total"])
    assert metrics["train/truncated_share"] == pytest.approx(2 / 6)


@pytest.mark.parametrize("reduction", get_args(Reduction))
def test_a_masked_reward_has_the_gradient_of_the_others_alone(reduction: Any) -> None:
    """Their groups are the smaller ones, too."""
    cut = (0, 3)
    masked, _ = gradients(truncated(cut), 10**6, MASKED, weight=0, reduction=reduction)
    left = without(truncated(cut), cut)
    alone, _ = gradients(left, 10**6, RewardConfig(), weight=0, reduction=reduction)
    assert close(masked, alone)


def test_without_a_mask_those_cut_off_count_and_one_of_the_reward_leaves_the_rest() -> None:
    plain, _ = gradients(truncated(()), 10**6)
    cut, _ = gradients(truncated((1, 3)), 10**6)
    assert close(plain, cut)
    shares, _ = TokenWeighting(reward_weight=1.0, mask_truncated_rewards=True)(
        headers_of(truncated((1,)))
    )
    plain, _ = TokenWeighting(reward_weight=1.0)(headers_of(truncated((1,))))
    assert [share.weight for share in shares] == [share.weight for share in plain]
    assert (shares[1].reward_weight, shares[1].advantage) == (0.0, 0.0)


@pytest.mark.parametrize("cut", [(0, 1), (0, 1, 2)])
def test_a_group_of_which_one_or_none_is_left_has_no_advantage(cut: Sequence[int]) -> None:
    weighting = TokenWeighting(reward_weight=1.0, mask_truncated_rewards=True)
    shares, metrics = weighting(headers_of(truncated(cut)))
    assert [share.advantage for share in shares[:3]] == [0.0] * 3
    assert metrics["reward/flat_groups"] == 0.5


def test_a_batch_that_was_cut_off_whole_changes_no_weight() -> None:
    loss = ForwardKLConfig(mask_truncated=True)
    train = TrainConfig(weight_decay=0, warmup_steps=0)
    shares = TokenWeighting.of(loss, None, 20)
    made = Learner(
        Rank(PlacedStudent(tiny_model(), build_objective(loss), train, torch.device("cpu"))), shares
    )
    report = made.train_batch(truncated(range(6)))
    assert report.metrics["loss/total"] == 0.0
    before, after = tiny_model().state_dict(), made.model.state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before)
