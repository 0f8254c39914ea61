"""What each token of a batch weighs, in the distillation loss and in the reward's.

samples ──lengths, teachers' weights──► reduction × weight ──┐
   └──groups──► advantages ──────────────────────────────────┴──► one Share a sample
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np

from async_opd.core.samples import Sample
from trainer.advantages import Normalize, advantages, groups_of, rewards_of
from trainer.losses.reduction import token_weights

if TYPE_CHECKING:
    from async_opd.core.loss_config import Loss, Reduction, RewardConfig


@dataclass(frozen=True)
class Share:
    """Of every token of one sample. ``advantage`` is None where there is no reward."""

    weight: float = 1.0
    reward_weight: float = 0.0
    advantage: float | None = None


@dataclass(frozen=True)
class Shares:
    """How a batch becomes shares. ``reward_weight`` None: there is no reward.

    ``teachers`` are the weights of teachers' samples in the distillation loss, 1 for those that are
    not there; the reward is no teacher's, and weighs all samples alike.
    """

    weight: float = 1.0
    reduction: Reduction = "token_mean"
    max_tokens: int = 1
    reward_weight: float | None = None
    normalize: Normalize = "std"
    teachers: Mapping[str, float] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        loss: Loss,
        reward: RewardConfig | None,
        max_tokens: int,
        teachers: Mapping[str, float] | None = None,
    ) -> Shares:
        """As configured; ``max_tokens`` is ``rollout.max_tokens``, ``teachers`` their weights."""
        made = cls(loss.weight, loss.reduction, max_tokens, teachers=teachers or {})
        if reward is None:
            return made
        return replace(made, reward_weight=reward.weight, normalize=reward.normalize)

    def __call__(self, samples: Sequence[Sample]) -> tuple[list[Share], dict[str, float]]:
        """A share for each sample of a whole batch, and metrics of its rewards.

        StageError for a sample without a reward, where there is one. Groups must be whole.
        """
        lengths = [len(sample.rollout.response_ids) for sample in samples]
        own = [self.teachers.get(sample.rollout.prompt.teacher, 1.0) for sample in samples]
        distilled = token_weights(lengths, self.reduction, self.max_tokens, own)
        if self.reward_weight is None or not samples:
            return [Share(self.weight * weight) for weight in distilled], {}
        rewarded = token_weights(lengths, self.reduction, self.max_tokens)
        rewards, groups = rewards_of(samples), groups_of(samples)
        values = advantages(rewards, groups, self.normalize)
        shares = [
            Share(self.weight * mine, self.reward_weight * alike, value)
            for mine, alike, value in zip(distilled, rewarded, values, strict=True)
        ]
        flat = sum(all(values[index] == 0 for index in group) for group in groups)
        return shares, {
            "reward/mean": float(np.mean(rewards)),
            "reward/std": float(np.std(rewards)),
            "reward/flat_groups": flat / len(groups),
            "reward/advantage_abs": float(np.mean(np.abs(values))),
            "reward/advantage_max": float(np.max(values)),
        }
