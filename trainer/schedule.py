"""The learning rate of a step, as a function of the step and the config only."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from async_opd.config.sections.train import TrainConfig


def learning_rate(step: int, train: TrainConfig) -> float:
    """The rate of step ``step`` (0-based): linear warm-up, then constant or a cosine to the end.

    The first step of a warm-up has lr / warmup_steps. With a cosine the last step (steps - 1) has
    lr · min_lr_ratio, if at least two steps follow the warm-up.
    """
    if step < train.warmup_steps:
        return train.lr * (step + 1) / train.warmup_steps
    if train.schedule == "constant":
        return train.lr
    span = max(train.steps - 1 - train.warmup_steps, 1)
    progress = min((step - train.warmup_steps) / span, 1.0)
    cosine = 0.5 * (1 + math.cos(math.pi * progress))
    return train.lr * (train.min_lr_ratio + (1 - train.min_lr_ratio) * cosine)
