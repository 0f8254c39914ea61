"""Responses that were cut off are left out: of losses, denominators and groups."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, get_args

import pytest
import torch

from async_opd.config.sections.loss import ForwardKLConfig, Reduction, RewardConfig
from async_opd.config.sections.train import TrainConfig
from async_opd.core.samples import Sample
from tests.trainer.models import headers_of, tiny_model
from tests.trainer.test_token_weights import close, gradients, with_reward
from trainer.batches.token_weights import TokenWeighting
from trainer.learner import Learner
from trainer.losses import build_objective
from trainer.rank import Rank

REDUCTIONS = get_args(Reduction)
MASKED = RewardConfig(mask_truncated=True)


def batch(cut: Sequence[int], rewards: Sequence[float] = (1, 0, 0, 1, 1, 0)) -> list[Sample]:
    """Two groups of three; those at ``cut`` were cut off."""
    samples = [with_reward(index, index // 3, reward) for index, reward in enumerate(rewards)]
    return [
        replace(s, rollout=replace(s.rollout, finish_reason="length")) if i in cut else s
        for i, s in enumerate(samples)
    ]


def without(samples: Sequence[Sample], cut: Sequence[int]) -> list[Sample]:
    return [sample for index, sample in enumerate(samples) if index not in cut]


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_a_masked_batch_has_the_gradient_of_the_others_alone(reduction: Any) -> None:
    cut = (1, 3)
    masked, metrics = gradients(batch(cut), 10**6, reduction=reduction, mask_truncated=True)
    alone, others = gradients(without(batch(cut), cut), 10**6, reduction=reduction)
    assert close(masked, alone)
    assert metrics["loss/total"] == pytest.approx(others["loss/total"])
    assert metrics["train/truncated_share"] == pytest.approx(2 / 6)


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_a_masked_reward_has_the_gradient_of_the_others_alone(reduction: Any) -> None:
    """Their groups are the smaller ones, too."""
    cut = (0, 3)
    masked, _ = gradients(batch(cut), 10**6, MASKED, weight=0, reduction=reduction)
    left = without(batch(cut), cut)
    alone, _ = gradients(left, 10**6, RewardConfig(), weight=0, reduction=reduction)
    assert close(masked, alone)


def test_without_a_mask_those_cut_off_count() -> None:
    plain, _ = gradients(batch(()), 10**6)
    cut, _ = gradients(batch((1, 3)), 10**6)
    assert close(plain, cut)


def test_a_mask_of_the_reward_leaves_the_distillation_alone() -> None:
    shares, _ = TokenWeighting(reward_weight=1.0, mask_truncated_rewards=True)(
        headers_of(batch((1,)))
    )
    plain, _ = TokenWeighting(reward_weight=1.0)(headers_of(batch((1,))))
    assert [share.weight for share in shares] == [share.weight for share in plain]
    assert (shares[1].reward_weight, shares[1].advantage) == (0.0, 0.0)


def test_a_group_of_which_one_is_left_has_no_advantage() -> None:
    shares, metrics = TokenWeighting(reward_weight=1.0, mask_truncated_rewards=True)(
        headers_of(batch((0, 1)))
    )
    assert [share.advantage for share in shares[:3]] == [0.0] * 3
    assert metrics["reward/flat_groups"] == 0.5


def test_a_group_that_was_cut_off_whole_has_no_advantage() -> None:
    shares, _ = TokenWeighting(reward_weight=1.0, mask_truncated_rewards=True)(
        headers_of(batch((0, 1, 2)))
    )
    assert [share.advantage for share in shares[:3]] == [0.0] * 3


def test_a_batch_that_was_cut_off_whole_changes_no_weight() -> None:
    loss = ForwardKLConfig(mask_truncated=True)
    train = TrainConfig(weight_decay=0, warmup_steps=0)
    shares = TokenWeighting.of(loss, None, 20)
    made = Learner(Rank(tiny_model(), build_objective(loss), train, torch.device("cpu")), shares)
    report = made.train_batch(batch(range(6)))
    assert report.metrics["loss/total"] == 0.0
    before, after = tiny_model().state_dict(), made.model.state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before)
