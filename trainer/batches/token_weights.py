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

With ``async.on_stale: mask`` tokens that were sampled under a version below ``oldest`` (the
trainer's version less ``async.max_version_lag``) weigh 0 in the distillation loss, and R_s are the
other tokens: responses without any are as empty ones. The reward's loss has all of them.

Advantages are group-relative (GRPO, arXiv:2402.03300): rewards compared within a prompt's group.

    A_i = (r_i - mean(r)) / std(r)       ``std``; population standard deviation of the group
    A_i = r_i - mean(r)                  ``none`` (arXiv:2503.20783: no bias towards easy prompts)

A group whose rewards are all equal ("flat") has advantages 0. Rewards that differ by no more than
``ROUNDING`` count as equal: divided by the standard deviation, 0.1 + 0.2 + 0.3 would be better than
0.6 by one standard deviation.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal

import numpy as np

from async_opd.core.errors import StageError
from async_opd.core.samples import Header
from async_opd.core.uid import Uid, prompt_uid

if TYPE_CHECKING:
    from async_opd.config.sections.loss import Loss, Reduction, RewardConfig

Normalize = Literal["std", "none"]

ROUNDING = 1e-6
"""Largest difference of equal rewards, relative to the largest of their group or to 1: graders
return 0 to 1, and float32 rounds a sum by about 1e-7 of it."""


def rewards_of(headers: Sequence[Header]) -> list[float]:
    """The grader's rewards, in order; StageError for one that is missing or not finite."""
    rewards = []
    for header in headers:
        reward = header.reward
        if reward is None or not math.isfinite(reward):
            raise StageError(
                "trainer",
                f"sample {header.uid} has reward {reward}; expected a finite number",
                "make reward.grader return a finite number for it",
            )
        rewards.append(float(reward))
    return rewards


def groups_of(headers: Sequence[Header]) -> list[list[int]]:
    """Indices of the rollouts of each prompt, by the uid without its last part."""
    groups: dict[Uid, list[int]] = defaultdict(list)
    for index, header in enumerate(headers):
        groups[prompt_uid(header.uid)].append(index)
    return list(groups.values())


def advantages(
    rewards: Sequence[float], groups: Sequence[Sequence[int]], normalize: Normalize
) -> list[float]:
    """The advantage of each rollout, in the order of ``rewards``.

    It is 0 for all rollouts of a flat group and for those in no group.
    """
    result = [0.0] * len(rewards)
    for group in groups:
        own = np.array([rewards[index] for index in group])
        if not len(own) or np.ptp(own) <= ROUNDING * max(1.0, np.abs(own).max()):
            continue
        scale = own.std() if normalize == "std" else 1.0
        for index, value in zip(group, (own - own.mean()) / scale, strict=True):
            result[index] = float(value)
    return result


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
    and they count in no denominator and in no group. ``max_lag`` is the bound of a token's age in
    the distillation loss, in versions.
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
    max_lag: int | None = None

    @classmethod
    def of(
        cls,
        loss: Loss,
        reward: RewardConfig | None,
        max_tokens: int,
        teachers: Mapping[str, float | Literal["auto"]] | None = None,
        max_lag: int | None = None,
    ) -> TokenWeighting:
        """From the config; ``max_tokens`` is ``response_tokens``, ``teachers`` are weights."""
        given = teachers or {}
        fixed = {name: one for name, one in given.items() if one != "auto"}
        made = cls(loss.weight, loss.reduction, max_tokens, teachers=fixed, max_lag=max_lag)
        made = replace(made, auto=len(fixed) < len(given), mask_truncated=loss.mask_truncated)
        if reward is None:
            return made
        made = replace(made, reward_weight=reward.weight, normalize=reward.normalize)
        return replace(made, mask_truncated_rewards=reward.mask_truncated)

    def oldest(self, version: int) -> int:
        """The oldest version whose tokens the distillation loss trains, at the trainer's one."""
        return 0 if self.max_lag is None else max(version - self.max_lag, 0)

    def masked(self, headers: Sequence[Header], oldest: int) -> dict[str, float]:
        """Metrics: shares of the batch's response tokens that are older than this version.

        With a reward also the share that its loss trains all the same. None without ``max_lag``.
        """
        if self.max_lag is None:
            return {}
        tokens = sum(header.response_tokens for header in headers) or 1
        old = [header.response_tokens - header.tokens_since(oldest) for header in headers]
        metrics = {"staleness/masked_tokens": sum(old) / tokens}
        if self.reward_weight is not None:
            counts = _counted(headers, self.mask_truncated_rewards)
            rewarded = sum(count * one for count, one in zip(counts, old, strict=True))
            metrics["staleness/reward_tokens"] = rewarded / tokens
        return metrics

    def __call__(
        self, headers: Sequence[Header], oldest: int = 0
    ) -> tuple[list[TokenWeight], dict[str, float]]:
        """The token weights of each sample of a whole batch, and metrics of its rewards.

        Those in the distillation loss are of tokens of version ``oldest`` and later ones: no older
        token is in a denominator. The batch must hold whole groups. With a reward, StageError for a
        sample without one.
        """
        own = [self.teachers.get(header.teacher, 1.0) for header in headers]
        distilled = self._weights(headers, self.mask_truncated, own, oldest)
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
        self,
        headers: Sequence[Header],
        masked: bool,
        own: Sequence[float] | None = None,
        oldest: int = 0,
    ) -> list[float]:
        """The weight of each sample's tokens; ``masked``: of truncated ones 0, as if empty."""
        counts = _counted(headers, masked)
        lengths = [h.tokens_since(oldest) * one for h, one in zip(headers, counts, strict=True)]
        weights = token_weights(lengths, self.reduction, self.max_tokens, own)
        return [weight * one for weight, one in zip(weights, counts, strict=True)]


def _counted(headers: Sequence[Header], masked: bool) -> list[bool]:
    """Which samples count; ``masked``: truncated ones do not."""
    return [not (masked and _is_truncated(header)) for header in headers]


def _is_truncated(header: Header) -> bool:
    return header.finish_reason == "length"
