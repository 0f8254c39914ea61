"""Sampled-token estimators k1, k2, k3 and abs (Schulman, "Approximating KL Divergence"); binary KL.

With y ~ q and d = log q(y) - log p(y):

    k1 = d               policy gradient -A ∇log q with A = -d:  in expectation that of KL(q ‖ p)
    k2 = d² / 2          supervised gradient d ∇log q:           in expectation that of KL(q ‖ p)
    k3 = exp(-d) - 1 + d supervised gradient (1 - p/q) ∇log q:   in expectation that of KL(p ‖ q)
    abs = |d|            supervised gradient sign(d) ∇log q:     in expectation that of Σ |q - p|

    binary_kl = q (log q - log p) + (1 - q) (log(1 - q) - log(1 - p)), of q(y) and p(y)

is KL(q ‖ p) of two outcomes, y and any other token: never above KL(q ‖ p) over the vocabulary, and
0 if and only if q(y) = p(y). Its supervised gradient is q (d - log(1 - q) + log(1 - p)) ∇log q.
TRL's reverse KL of the sampled token with a tail (``reverse_kl_top_1_mode: sampled``) is this.
1 - p counts as LEAST_REST at least: float32 rounds smaller rests of a teacher's log p away. 1 - q
is that of the student's own logits, which has no such limit.

``policy_gradient`` holds the estimate constant and uses its negative as the advantage of the
sampled token: the loss is -A log q(y) with A = -k(d). That is not the gradient of the estimate's
expectation, but the usual meaning of the name. k1 has no supervised gradient: its expectation is
E[∇ log q] = 0, without the teacher. A > 0 where the teacher gives the token a higher probability
than the student. q is always the student under its current weights, never under those that sampled.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, Protocol

import torch

Estimator = Literal["k2", "k3", "abs", "binary_kl"]
LEAST_REST = 1e-5
"""Least probability of all tokens but the sampled one under the teacher."""


@dataclass(frozen=True)
class SampledSlopes:
    """A value per token [n], its derivative by log q(y) [n], and which advantages were clamped."""

    value: torch.Tensor
    slope: torch.Tensor
    clamped: torch.Tensor | None = None


class SampledLoss(Protocol):
    """A loss of log p(y), log q(y) and log(1 - q(y)), each [n].

    The last one is exact, also where q rounds to 1.
    """

    def __call__(
        self, log_p: torch.Tensor, log_q: torch.Tensor, log_rest: torch.Tensor
    ) -> SampledSlopes: ...


@dataclass(frozen=True)
class SampledEstimator:
    """The estimate of each token, or its policy gradient with the advantage clamped."""

    kind: Estimator
    gradient: Literal["supervised", "policy_gradient"]
    clamp: float | None

    def __call__(
        self, log_p: torch.Tensor, log_q: torch.Tensor, log_rest: torch.Tensor
    ) -> SampledSlopes:
        value, slope = self._estimate(log_p, log_q, log_rest)
        if self.gradient == "supervised":
            return SampledSlopes(value, slope)
        return policy_gradient(-value, log_q, self.clamp)

    def _estimate(
        self, log_p: torch.Tensor, log_q: torch.Tensor, log_rest: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        gap = log_q - log_p
        if self.kind == "binary_kl":
            q, rest = log_q.exp(), log_rest.exp()
            least = math.log(torch.finfo(rest.dtype).tiny)  # finite, and counts 0 times
            teacher_rest = (-torch.expm1(log_p)).clamp_min(LEAST_REST)
            of_rest = log_rest.clamp_min(least) - teacher_rest.log()
            return q * gap + rest * of_rest, q * (gap - of_rest)
        if self.kind == "k2":
            return gap.square() / 2, gap
        if self.kind == "k3":
            return torch.expm1(-gap) + gap, -torch.expm1(-gap)
        return gap.abs(), gap.sign()


def policy_gradient(
    advantage: torch.Tensor, log_q: torch.Tensor, clamp: float | None
) -> SampledSlopes:
    """-A log q(y), with the advantage bounded to [-clamp, clamp]."""
    if clamp is None:
        return SampledSlopes(-advantage * log_q, -advantage)
    bounded = advantage.clamp(-clamp, clamp)
    return SampledSlopes(-bounded * log_q, -bounded, advantage.abs() > clamp)


@dataclass(frozen=True)
class CrossEntropy:
    """-log q(y_t) of given tokens, which the student did not sample; slope -1 by log q(y_t).

    For the supervised steps of a cold start: forward KL(p ‖ q) of a p with all its mass on y_t.
    """

    def __call__(
        self, log_p: torch.Tensor, log_q: torch.Tensor, log_rest: torch.Tensor
    ) -> SampledSlopes:
        return SampledSlopes(-log_q, torch.full_like(log_q, -1.0))


@dataclass(frozen=True)
class K1:
    """-A_t log q(y_t) of each token; ``clamp`` bounds A_t to [-clamp, clamp]."""

    clamp: float | None

    def __call__(
        self, log_p: torch.Tensor, log_q: torch.Tensor, log_rest: torch.Tensor
    ) -> SampledSlopes:
        return policy_gradient(log_p - log_q, log_q, self.clamp)
