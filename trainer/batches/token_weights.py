"""The weight of each token of a batch, in the distillation loss and in the reward's loss.

headers ──lengths, teachers' weights──► reduction × weight ──┐
   └──groups──► advantages ──────────────────────────────────┴──► one TokenWeight a sample

For samples s of weight a_s (their teacher's), R_s response tokens each:

    token_mean               a_s / T                   T = Σ a_s R_s
    seq_mean_token_mean      a_s / (B · R_s)           B = Σ a_s over samples with a response
    seq_mean_token_sum       a_s / B
    seq_mean_token_sum_norm  a_s / (B · max_tokens)

Weights a_s that are all equal change nothing. All denominators are those of the whole batch, so
that neither micro-batches nor ranks change the result. Empty responses have no tokens and count in
no denominator.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal

import numpy as np

from async_opd.core.samples import Header
from trainer.batches.advantages import Normalize, advantages, groups_of, rewards_of

if TYPE_CHECKING:
    from async_opd.config.sections.loss import Loss, Reduction, RewardConfig


def token_weights(
    lengths: Sequence[int],
    reduction: Reduction,
    max_tokens: int,
    weights: Sequence[float] | None = None,
) -> list[float]:
    """The weight of each token of each sample; ``lengths`` are the batch's response lengths.

    ``weights`` are a_s, positive; by default all 1.
    """
    weights = weights or [1.0] * len(lengths)
    pairs = list(zip(weights, lengths, strict=True))
    if reduction == "token_mean":
        tokens = sum(weight * length for weight, length in pairs) or 1.0
        return [weight / tokens for weight in weights]
    samples = sum(weight for weight, length in pairs if length) or 1.0
    if reduction == "seq_mean_token_mean":
        return [weight / (samples * max(length, 1)) for weight, length in pairs]
    norm = max_tokens if reduction == "seq_mean_token_sum_norm" else 1
    return [weight / (samples * norm) for weight in weights]


@dataclass(frozen=True)
class TokenWeight:
    """The weights of every token of one sample. ``advantage`` is None without a reward."""

    weight: float = 1.0
    reward_weight: float = 0.0
    advantage: float | None = None


@dataclass(frozen=True)
class TokenWeighting:
    """Computes the token weights of a batch. ``reward_weight`` None: there is no reward.

    ``teachers`` are the weights of teachers' samples in the distillation loss, by default 1; the
    reward weighs the samples of all teachers alike. With ``auto`` each step multiplies them by
    factors (``balance.py``). ``mask_truncated`` excludes truncated responses
    from the distillation loss, ``mask_truncated_rewards`` from the reward's: their tokens weigh 0,
    and they count in no denominator and in no group.
    """

    weight: float = 1.0
    reduction: Reduction = "token_mean"
    max_tokens: int = 1
    reward_weight: float | None = None
    normalize: Normalize = "std"
    teachers: Mapping[str, float] = field(default_factory=dict)
    auto: bool = False
    mask_truncated: bool = False
    mask_truncated_rewards: bool = False

    @classmethod
    def of(
        cls,
        loss: Loss,
        reward: RewardConfig | None,
        max_tokens: int,
        teachers: Mapping[str, float | Literal["auto"]] | None = None,
    ) -> TokenWeighting:
        """From the config; ``max_tokens`` is ``rollout.max_tokens``, ``teachers`` are weights."""
        given = teachers or {}
        fixed = {name: one for name, one in given.items() if one != "auto"}
        made = cls(loss.weight, loss.reduction, max_tokens, teachers=fixed)
        made = replace(made, auto=len(fixed) < len(given), mask_truncated=loss.mask_truncated)
        if reward is None:
            return made
        made = replace(made, reward_weight=reward.weight, normalize=reward.normalize)
        return replace(made, mask_truncated_rewards=reward.mask_truncated)

    def __call__(self, headers: Sequence[Header]) -> tuple[list[TokenWeight], dict[str, float]]:
        """The token weights of each sample of a whole batch, and metrics of its rewards.

        The batch must hold whole groups. With a reward, StageError for a sample without one.
        """
        own = [self.teachers.get(header.teacher, 1.0) for header in headers]
        distilled = self._weights(headers, self.mask_truncated, own)
        if self.reward_weight is None or not headers:
            return [TokenWeight(self.weight * weight) for weight in distilled], {}
        rewarded = self._weights(headers, self.mask_truncated_rewards)
        rewards, groups = rewards_of(headers), groups_of(headers)
        if self.mask_truncated_rewards:
            groups = [[i for i in group if not _is_truncated(headers[i])] for group in groups]
        values = advantages(rewards, groups, self.normalize)
        token_weights = [
            TokenWeight(self.weight * mine, self.reward_weight * alike, value)
            for mine, alike, value in zip(distilled, rewarded, values, strict=True)
        ]
        flat = sum(all(values[index] == 0 for index in group) for group in groups)
        return token_weights, {
            "reward/mean": float(np.mean(rewards)),
            "reward/std": float(np.std(rewards)),
            "reward/flat_groups": flat / len(groups),
            "reward/advantage_abs": float(np.mean(np.abs(values))),
            "reward/advantage_max": float(np.max(values)),
        }

    def _weights(
        self, headers: Sequence[Header], masked: bool, own: Sequence[float] | None = None
    ) -> list[float]:
        """The weight of each sample's tokens; ``masked``: of truncated ones 0, as if empty."""
        counts = [not (masked and _is_truncated(header)) for header in headers]
        lengths = [h.response_tokens * one for h, one in zip(headers, counts, strict=True)]
        weights = token_weights(lengths, self.reduction, self.max_tokens, own)
        return [weight * one for weight, one in zip(weights, counts, strict=True)]


def _is_truncated(header: Header) -> bool:
    return header.finish_reason == "length"
