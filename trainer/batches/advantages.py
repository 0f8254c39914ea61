"""Group-relative advantages (GRPO, arXiv:2402.03300): rewards compared within a prompt's group.

    A_i = (r_i - mean(r)) / std(r)       ``std``; population standard deviation of the group
    A_i = r_i - mean(r)                  ``none`` (arXiv:2503.20783: no bias towards easy prompts)

A group whose rewards are all equal ("flat") has advantages 0. Rewards that differ by no more than
``ROUNDING`` count as equal: divided by the standard deviation, 0.1 + 0.2 + 0.3 would be better than
0.6 by one standard deviation.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from typing import Literal

import numpy as np

from async_opd.core.errors import StageError
from async_opd.core.samples import Header
from async_opd.core.uid import Uid, prompt_uid

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
