"""The loss that a step minimizes: distillation and reward, with a weight for each token.

    loss = Σ_t w_t · i_t · c_t · D_t  +  Σ_t v_t · S_t

D_t is the distillation term, w_t its weight and reduction, i_t the importance weight, c_t the
clamp's scale; S_t the reward's surrogate, v_t its weight and reduction. i and c are held constant.

    i_t = min(q(y_t) / mu(y_t), cap)       truncated importance sampling (arXiv:2606.24143), or
    i_t = min(Π_s q(y_s) / mu(y_s), cap)   over all s of the response: sequence-level truncation

mu is the distribution that was sampled, at the rollouts' temperature. The q of both ratios has the
same temperature, so that ratios measure staleness alone and are 1 without it. The q of D_t is
always at temperature 1; its p already has the teacher's temperature.

S_t is PPO's clipped surrogate (arXiv:1707.06347, eq. 7) of the task reward:

    S_t = -min(r A, clip(r, 1 - low, 1 + high) A),     r = q(y_t) / mu(y_t)
    A < 0:   at most -dual A                           (arXiv:1912.09729, eq. 5)

r corrects for stale rollouts too. Without ``dual`` the loss of a token with a negative advantage
grows without bound with r, and a token that the student has come to prefer outweighs all others. A
token whose loss is one of the bounds has no gradient; the shares of such tokens are metrics.
"""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass

import torch

from trainer.losses.base import Tokens
from trainer.losses.recorded import STUDENT, TEACHER
from trainer.losses.terms import Metrics, Term


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


LOG_RATIO = "log_ratio"
"""Name of log q - log mu of each token in nats, at the rollouts' temperature."""
MASKED = "masked"
"""Name of which tokens are masked."""
MAX_LOG_RATIO = 80.0
"""Largest log-ratio, in nats: float32 overflows at exp(88), and no metric may be infinite."""


@dataclass(frozen=True, eq=False)
class Objective:
    """Computes the losses of a tile of rows and overwrites the rows by their gradient.

    ``importance_cap`` None: no importance weights. ``weighs_responses``: one importance weight for
    all tokens of a response, from ``Tokens.response_log_ratios``. ``exact_when_fresh``: that of
    ``Tokens.fresh`` is 1. ``surrogate`` None: no reward.
    """

    term: Term
    _: KW_ONLY
    importance_cap: float | None = None
    weighs_responses: bool = False
    exact_when_fresh: bool = False
    surrogate: ClippedSurrogate | None = None
    temperature: float = 1.0

    @property
    def needs_response_ratios(self) -> bool:
        """Whether tokens must come with ``response_log_ratios``."""
        return self.weighs_responses and self.importance_cap is not None

    def __call__(
        self, logits: torch.Tensor, tokens: Tokens, teacher: torch.Tensor | None = None
    ) -> Metrics:
        """Overwrites logits [n, V] by the gradient of Σ total; returns values [n] by name.

        ``total`` is each token's summand of the loss. The teacher's logits are overwritten too.
        """
        tempered = None  # log q [n, V] at the rollouts' temperature; the term has it at 1
        if self.temperature != 1:
            tempered = (logits / self.temperature).log_softmax(-1)
        opened = self.term.open(logits, tokens, teacher)
        log_q = opened.log_sampled
        if tempered is not None:
            log_q = tempered.gather(-1, tokens.targets[:, None])[:, 0]
        log_ratio = log_q - tokens.rollout_logprobs.to(log_q.dtype)
        ratio, factor = log_ratio.clamp_max(MAX_LOG_RATIO).exp(), tokens.weights.to(log_q.dtype)
        metrics = {
            "distillation": opened.value,
            "k1": opened.log_sampled - opened.teacher_sampled,
            "rollout_gap": log_ratio.abs(),
            "entropy": opened.entropy,
            STUDENT: opened.log_sampled,
            TEACHER: opened.teacher_sampled,
            "importance": ratio,
            LOG_RATIO: log_ratio,
            **opened.metrics,
        }
        if tokens.masked is not None:
            metrics[MASKED] = tokens.masked
        cap = self.importance_cap
        if cap is not None:
            weight = ratio
            if self.weighs_responses:  # q/mu of each token's whole response
                assert tokens.response_log_ratios is not None
                weight = tokens.response_log_ratios.clamp_max(MAX_LOG_RATIO).exp().to(ratio)
            if self.exact_when_fresh and tokens.fresh is not None:
                weight = torch.where(tokens.fresh, 1.0, weight)
            metrics["truncated"] = weight > cap
            metrics["importance_weight"] = weight = weight.clamp_max(cap)
            factor = factor * weight
        metrics["total"] = factor * opened.value
        slope = self._reward(log_ratio, tokens, metrics)
        # At another temperature log q of the reward has another gradient, which is added after:
        # of logit j it is g (1[j = y] - q_j) / T; g is ``slope``, q is at T.
        opened.close(factor, slope if tempered is None else None)
        if tempered is not None and slope is not None:
            slope = (slope / self.temperature)[:, None]
            logits.sub_(tempered.exp_().mul_(slope))
            logits.scatter_add_(-1, tokens.targets[:, None], slope)
        return metrics

    def _reward(
        self, log_ratio: torch.Tensor, tokens: Tokens, metrics: Metrics
    ) -> torch.Tensor | None:
        """Adds the reward to the metrics; returns its slope [n] by log q of the sampled tokens."""
        if self.surrogate is None:
            return None
        assert tokens.advantages is not None
        assert tokens.reward_weights is not None
        weights = tokens.reward_weights.to(log_ratio.dtype)
        advantages = tokens.advantages.to(log_ratio.dtype)
        slopes = self.surrogate(log_ratio.clamp_max(MAX_LOG_RATIO), advantages)
        metrics["total"] = metrics["total"] + weights * slopes.value
        metrics["surrogate"] = slopes.value
        metrics["clipped"] = slopes.clipped
        if slopes.dual_clipped is not None:
            metrics["dual_clipped"] = slopes.dual_clipped
        return weights * slopes.slope
