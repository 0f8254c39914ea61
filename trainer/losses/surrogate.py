"""The loss of the task reward: PPO's clipped surrogate (arXiv:1707.06347, eq. 7) of each token.

    loss_t = -min(r A, clip(r, 1 - low, 1 + high) A),     r = q(y_t) / mu(y_t)
    A < 0:   at most -dual A                              (arXiv:1912.09729, eq. 5)

mu is the distribution that was sampled, so that r corrects for stale rollouts too. Without ``dual``
the loss of a token with a negative advantage grows without bound with r, and a token that the
student has come to prefer outweighs all others. A token whose loss is one of the bounds has no
gradient; the shares of such tokens are metrics.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class SurrogateSlopes:
    """A value per token [n], its derivative by log q(y) [n], and which tokens have no gradient.

    ``clipped``: by either bound; ``dual_clipped``: by ``dual``, None without it.
    """

    value: torch.Tensor
    slope: torch.Tensor
    clipped: torch.Tensor
    dual_clipped: torch.Tensor | None


@dataclass(frozen=True)
class ClippedSurrogate:
    """The surrogate of each token, by its log-ratio [n] and advantage [n]; ``dual`` above 1."""

    low: float
    high: float
    dual: float | None = None

    def __call__(self, log_ratio: torch.Tensor, advantage: torch.Tensor) -> SurrogateSlopes:
        """The caller bounds the log-ratio so that its exponential is finite."""
        ratio = log_ratio.exp()
        free = ratio * advantage
        bound = ratio.clamp(1 - self.low, 1 + self.high) * advantage
        clipped, value, beyond = bound < free, torch.minimum(free, bound), None
        if self.dual is not None:
            least = self.dual * advantage
            beyond = (advantage < 0) & (value < least)
            value, clipped = torch.where(beyond, least, value), clipped | beyond
        return SurrogateSlopes(-value, -free.masked_fill(clipped, 0.0), clipped, beyond)
