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


@given(st.lists(st.integers(0, 50), max_size=20))
def test_the_means_weigh_one_in_all(lengths: list[int]) -> None:
    for reduction in ("token_mean", "seq_mean_token_mean"):
        weights = token_weights(lengths, reduction, 1)
        total = sum(w * n for w, n in zip(weights, lengths, strict=True))
        assert total == pytest.approx(float(any(lengths)))


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


def test_a_group_is_what_shares_the_uid_up_to_its_last_part() -> None:
    assert groups_of(headers_of(batch())) == [[0, 1, 2], [3, 4, 5]]


def test_advantages_are_standardized_within_the_group() -> None:
    found = advantages([1, 0, 0, 5, 7, 6], [[0, 1, 2], [3, 4, 5]], "std")
    s = np.std([1, 0, 0])
    t = np.std([5, 7, 6])
    expected = [(2 / 3) / s, (-1 / 3) / s, (-1 / 3) / s, -1 / t, 1 / t, 0]
    assert found == pytest.approx(expected)


def test_advantages_can_keep_their_scale() -> None:
    assert advantages([4, 0], [[0, 1]], "none") == [2, -2]


@pytest.mark.parametrize("normalize", ["std", "none"])
def test_a_group_of_equal_rewards_has_no_advantage(normalize: Any) -> None:
    assert advantages([0.1] * 3, [[0, 1, 2]], normalize) == [0, 0, 0]


@pytest.mark.parametrize("normalize", ["std", "none"])
@pytest.mark.parametrize("odd", [0.1 + 0.2 + 0.3, float(np.float32(0.6)), 0.6 - 1e-7])
def test_rewards_that_differ_by_rounding_are_equal(odd: float, normalize: Any) -> None:
    assert advantages([odd, 0.6, 0.6, 0.6], [[0, 1, 2, 3]], normalize) == [0, 0, 0, 0]


@given(st.floats(0, 1e6), st.lists(st.floats(-1e-7, 1e-7), min_size=2, max_size=8))
def test_a_spread_within_rounding_is_flat_at_any_scale(reward: float, errors: list[float]) -> None:
    rewards = [reward * (1 + error) for error in errors]
    flat = [advantages(rewards, [range(len(rewards))], how) for how in ("std", "none")]  # type: ignore[arg-type]
    assert flat == [[0.0] * len(rewards)] * 2


def test_a_difference_of_a_thousandth_is_none_of_rounding() -> None:
    assert advantages([0.6, 0.601], [[0, 1]], "std") == pytest.approx([-1, 1])


def test_a_group_whose_rewards_differ_by_rounding_counts_as_flat() -> None:
    metrics = TokenWeighting(reward_weight=1.0)(
        headers_of(batch((0.1 + 0.2 + 0.3, 0.6, 0.6, 1, 0, 0)))
    )[1]
    assert metrics["reward/flat_groups"] == 0.5


@given(st.lists(st.floats(-5, 5), min_size=2, max_size=8))
def test_advantages_of_a_group_sum_to_nothing(rewards: list[float]) -> None:
    found = advantages(rewards, [range(len(rewards))], "none")
    assert sum(found) == pytest.approx(0, abs=1e-9)


@pytest.mark.parametrize("reward", [None, float("nan"), float("inf")])
def test_a_sample_without_a_reward_is_refused_with_its_uid(reward: float | None) -> None:
    with pytest.raises(StageError, match="e0/p0/1 has reward"):
        TokenWeighting(reward_weight=1.0)(headers_of(batch((1, reward, 0))))


def test_metrics_tell_what_the_rewards_were_like() -> None:
    metrics = TokenWeighting(reward_weight=1.0)(headers_of(batch()))[1]
    assert metrics["reward/mean"] == pytest.approx(4 / 6)
    assert metrics["reward/flat_groups"] == 0.5


def test_without_a_reward_nobody_looks_for_one() -> None:
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
    rank = Rank(tiny_model().double(), objective, train, torch.device("cpu"))
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


@pytest.mark.parametrize("reduction", get_args(Reduction))
def test_a_reduction_is_the_mean_of_what_it_says(reduction: Any) -> None:
    """Against the samples one by one."""
    samples = batch((None,) * 4)
    alone = [gradients([s], 10**6)[1]["loss/total"] for s in samples]
    sizes = [len(s.rollout.response_ids) for s in samples]
    sums = [mean * size for mean, size in zip(alone, sizes, strict=True)]
    expected = {
        "token_mean": sum(sums) / sum(sizes),
        "seq_mean_token_mean": sum(alone) / 4,
        "seq_mean_token_sum": sum(sums) / 4,
        "seq_mean_token_sum_norm": sum(sums) / 4 / 20,
    }[reduction]
    found = gradients(samples, 10**6, reduction=reduction)[1]["loss/total"]
    assert found == pytest.approx(expected)


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
    assert close(found, expected)  # type: ignore[arg-type]


@pytest.mark.parametrize("reduction", get_args(Reduction))
def test_teachers_weights_do_not_depend_on_the_split(reduction: Any) -> None:
    samples = of_two_teachers()
    whole, _ = gradients(samples, 10**6, teachers=TEACHERS, reduction=reduction)
    split, _ = gradients(samples[::-1], 5, teachers=TEACHERS, reduction=reduction)
    assert close(whole, split)


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


def test_equal_rewards_teach_nothing() -> None:
    kept, _ = gradients(batch((1,) * 6), 10**6, RewardConfig(), weight=0)
    assert max(float(g.abs().max()) for g in kept.values()) == 0


def test_a_rewarded_answer_becomes_more_likely() -> None:
    reward = RewardConfig()
    config = ForwardKLConfig(weight=0)
    train = TrainConfig(lr=1e-2, warmup_steps=0, schedule="constant")
    made = Learner(
        Rank(tiny_model(), build_objective(config, reward), train, torch.device("cpu")),
        TokenWeighting.of(config, reward, 20),
    )
    good, bad = (
        replace(s, rollout=replace(s.rollout, rollout_logprobs=s.rollout.rollout_logprobs * 0 - 3))
        for s in batch((1, 0, 0))[1:]
    )
    good = replace(good, rollout=replace(good.rollout, reward=1.0))
    gaps = [made.train_batch([good, bad]).metrics["reward/mean"] for _ in range(3)]
    assert gaps == [0.5] * 3
    ids = [torch.from_numpy(s.rollout.response_ids).long() for s in (good, bad)]
    prompts = [torch.from_numpy(s.rollout.prompt.token_ids).long() for s in (good, bad)]
    before = tiny_model()
    with torch.no_grad():
        gains = []
        for prompt, answer in zip(prompts, ids, strict=True):
            both = torch.cat([prompt, answer])[None]
            own = [
                model(both).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
                for model in (before, made.model)
            ]
            picked = [table.gather(-1, answer[:, None]).mean() for table in own]
            gains.append(float(picked[1] - picked[0]))
    assert gains[0] > 0 > gains[1]
