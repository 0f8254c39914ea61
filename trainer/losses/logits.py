"""Scaling and soft capping of logits before the softmax, and the derivative of both.

x ──tanh, where there is a soft cap──► ──scale──► y = scale · cap · tanh(x / cap)
∂loss/∂x ◄── · (scale - y² / (scale · cap²)) ──── ∂loss/∂y
"""

from __future__ import annotations

import torch

from async_opd.models.lm_head import LogitShape

PLAIN = LogitShape()
"""The shape that changes no logit."""


def shape_logits(logits: torch.Tensor, shape: LogitShape) -> torch.Tensor:
    """Shapes the logits in place, of any dimensions; returns them."""
    factor = shape.scale
    if shape.soft_cap is not None:
        logits.div_(shape.soft_cap).tanh_()
        factor *= shape.soft_cap
    return logits if factor == 1 else logits.mul_(factor)


def slope_of(shaped: torch.Tensor, shape: LogitShape) -> torch.Tensor | float:
    """∂shaped/∂plain, from shaped logits: a new tensor of their shape, or one number for all."""
    if shape.soft_cap is None:
        return shape.scale
    return shaped.square().div_(-shape.scale * shape.soft_cap**2).add_(shape.scale)
