"""Objectives, one file each. All are sums over response tokens, in nats; the learner divides.

``q`` is the student under its current weights, ``p`` the teacher; both at temperature 1. Responses
were sampled from the student (of a possibly older version).
"""

from __future__ import annotations

from typing import assert_never

from async_opd.core.config import (
    ForwardKLConfig,
    JSDConfig,
    K1Config,
    Loss,
    ReverseKLConfig,
    SampledConfig,
)
from trainer.losses.base import LossInputs, LossSums, TokenLoss
from trainer.losses.estimators import SampledEstimator
from trainer.losses.forward_kl import ForwardKL
from trainer.losses.jsd import JSD
from trainer.losses.k1 import K1
from trainer.losses.reverse_kl import ReverseKL

__all__ = [
    "JSD",
    "K1",
    "ForwardKL",
    "LossInputs",
    "LossSums",
    "ReverseKL",
    "SampledEstimator",
    "TokenLoss",
    "build_loss",
]


def build_loss(config: Loss) -> TokenLoss:
    """The objective a config names."""
    match config:
        case ForwardKLConfig():
            return ForwardKL(config.tail)
        case ReverseKLConfig():
            return ReverseKL(config.tail)
        case JSDConfig():
            return JSD(config.beta, config.tail)
        case K1Config():
            return K1(config.clamp)
        case SampledConfig():
            return SampledEstimator(config.kind, config.gradient, config.clamp)
    assert_never(config)
