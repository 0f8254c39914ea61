"""Objectives, one file each. All are sums over response tokens, in nats; the learner divides.

``q`` is the student under its current weights, ``p`` the teacher; both at temperature 1 over the
full vocabulary. Responses were sampled from the student (of a possibly older version).
"""

from __future__ import annotations

from async_opd.core.config import ForwardKLConfig, K1Config
from trainer.losses.base import LossInputs, LossSums, TokenLoss
from trainer.losses.forward_kl import ForwardKL
from trainer.losses.k1 import K1

__all__ = ["K1", "ForwardKL", "LossInputs", "LossSums", "TokenLoss", "build_loss"]


def build_loss(config: ForwardKLConfig | K1Config) -> TokenLoss:
    """The objective a config names."""
    if isinstance(config, K1Config):
        return K1(config.clamp)
    return ForwardKL(config.tail)
