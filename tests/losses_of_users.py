"""Losses of a user's package, with what is wrong in their names."""

from __future__ import annotations

import torch

CONSTANT = 1.0


def wrong_arguments(log_p: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return log_p.sum(-1), log_p


def wrong_shape(log_p: torch.Tensor, log_q: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return log_p - log_q, log_q


def wrong_slope(log_p: torch.Tensor, log_q: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return (log_q.exp() * (log_q - log_p)).sum(-1), log_q.exp()
