"""The squared Hellinger distance between p and q: between 0 and ``scale``, without a unit.

H²_t = scale · (1 - Σ_i √(p_i q_i))        ∂/∂log q_i = -scale/2 · √(p_i q_i)
"""

from __future__ import annotations

import torch


def squared_hellinger(
    log_p: torch.Tensor, log_q: torch.Tensor, scale: float = 1.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """The value [n] of each row, and its slope by each log q [n, K]."""
    roots = ((log_p + log_q) / 2).exp()
    return scale * (1 - roots.sum(-1)), -scale / 2 * roots
