"""The distillation loss of a tile of rows: opened, multiplied by factors of the caller, closed.

logits ──open──► values, log q of the sampled tokens ──factors──► close ──► gradient

A divergence over part of the vocabulary, k tokens, has three ways to treat the rest:

tail    bucket       the k tokens, and everything else as one more outcome: two distributions,
                     so that every divergence of them is one of coarser distributions
        ignore       the k tokens as they are: a divergence can be negative, and is never
                     clamped at 0, since that would remove the gradient of every such token
        renormalize  the k tokens, p and q both scaled to sum to 1

The k tokens may be the teacher's most probable or the student's: the formulas are the same.
Neither side's rest is computed as 1 - P, which float32 rounds away below 1e-5: both are sums over
the tokens outside. The student's bucket has no floor, which would remove the gradient of a
collapsed student.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch

from trainer.losses.base import DivergenceFunction, Tokens
from trainer.losses.estimators import SampledLoss, SampledSlopes
from trainer.losses.rows import FullRows, SupportRows, entropy_of

Tail = Literal["bucket", "ignore", "renormalize"]


@dataclass(frozen=True)
class SupportSlopes:
    """A value per token [n], and its derivatives: [n, k] by log q_i, [n, 1] by log q of the rest.

    ``rest`` is None where the loss does not depend on the rest.
    """

    value: torch.Tensor
    slope: torch.Tensor
    rest: torch.Tensor | None = None


def on_support(
    divergence: DivergenceFunction,
    tail: Tail,
    log_p: torch.Tensor,
    log_q: torch.Tensor,
    rest: tuple[torch.Tensor, torch.Tensor] | None,
) -> SupportSlopes:
    """The divergence of log p and log q [n, k]; ``rest`` is log p and log q [n, 1] of all others.

    It is None for a support of the whole vocabulary, which has no rest.
    """
    if tail == "renormalize":  # with q' = q / Q: ∂/∂log q_i = slope_i - q'_i Σ_j slope_j
        scaled = log_q.log_softmax(-1)
        value, slope = divergence(log_p.log_softmax(-1), scaled)
        return SupportSlopes(value, slope - scaled.exp() * slope.sum(-1, keepdim=True))
    if tail == "ignore" or rest is None:
        return SupportSlopes(*divergence(log_p, log_q))
    value, slope = divergence(
        torch.cat([log_p, rest[0]], dim=-1), torch.cat([log_q, rest[1]], dim=-1)
    )
    return SupportSlopes(value, slope[:, :-1], slope[:, -1:])


Metrics = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Opened:
    """Rows whose losses are known: ``value`` [n], log q and log p of the sampled tokens [n], nats.

    ``entropy`` [n] is the student's, over its whole vocabulary, in nats. ``close(factor, sampled)``
    overwrites the logits by the gradient of Σ factor · value, ``factor`` [n] held constant, plus
    that of another loss, whose derivative by log q of the sampled tokens is ``sampled`` [n].
    """

    value: torch.Tensor
    entropy: torch.Tensor
    log_sampled: torch.Tensor
    teacher_sampled: torch.Tensor
    metrics: Metrics
    close: Callable[[torch.Tensor, torch.Tensor | None], None]


class Term(ABC):
    """A distillation loss per token."""

    @abstractmethod
    def open(self, logits: torch.Tensor, tokens: Tokens, teacher: torch.Tensor | None) -> Opened:
        """Computes the losses; overwrites the logits [n, V] and the teacher's [n, V_teacher].

        ``teacher`` is None unless the term is over the whole vocabulary.
        """


class MetricsOnly:
    """A loss of 0 without gradient: the sampled tokens are only measured."""

    def __call__(
        self, log_p: torch.Tensor, log_q: torch.Tensor, log_rest: torch.Tensor
    ) -> SampledSlopes:
        nothing = torch.zeros_like(log_q)
        return SampledSlopes(nothing, nothing)


@dataclass(frozen=True)
class Sampled(Term):
    """A loss of the sampled token alone; ``floor`` is the least log p, in nats."""

    loss: SampledLoss
    floor: float = -math.inf

    def open(self, logits: torch.Tensor, tokens: Tokens, teacher: torch.Tensor | None) -> Opened:
        assert tokens.teacher_logprobs is not None
        targets = tokens.targets[:, None]
        rows = SupportRows(logits, targets, targets)
        entropy, log_sampled = rows.entropy(), rows.log_sampled[:, 0]
        teacher_sampled = tokens.teacher_logprobs.to(logits.dtype).clamp_min(self.floor)
        slopes = self.loss(teacher_sampled, log_sampled, rows.log_rest[:, 0])
        metrics = {} if slopes.clamped is None else {"clamped": slopes.clamped}

        def close(factor: torch.Tensor, sampled: torch.Tensor | None) -> None:
            slope = slopes.slope * factor
            if sampled is not None:
                slope = slope + sampled
            rows.close(slope[:, None], None, None)

        return Opened(slopes.value, entropy, log_sampled, teacher_sampled, metrics, close)


OVERLAP_EVERY = 16
"""Of so many rows one has its overlap measured, which takes a top-k of the whole vocabulary."""


@dataclass(frozen=True)
class OnTopK(Term):
    """A divergence over k tokens a row, the teacher's or the student's most probable.

    ``overlap``: the support is the teacher's top-k, and its overlap with the student's is a metric.
    """

    divergence: DivergenceFunction
    tail: Tail
    clamp: float | None
    overlap: bool = False

    def open(self, logits: torch.Tensor, tokens: Tokens, teacher: torch.Tensor | None) -> Opened:
        """ValueError without a top-k support and the logarithm of its rest."""
        if tokens.teacher_ids is None or tokens.teacher_rest_logprobs is None:
            raise ValueError("this objective needs a top-k support and the logarithm of its rest")
        assert tokens.teacher_topk_logprobs is not None
        assert tokens.teacher_logprobs is not None
        ids = tokens.teacher_ids
        overlap = topk_overlap(logits, ids) if self.overlap else None  # before they are overwritten
        rows = SupportRows(logits, ids, tokens.targets[:, None])
        log_p = tokens.teacher_topk_logprobs.to(logits.dtype)
        log_rest = tokens.teacher_rest_logprobs.to(logits.dtype)[:, None]
        # A support of all tokens leaves no rest, whose log q would be log 0.
        rest = None if ids.shape[-1] >= logits.shape[-1] else (log_rest, rows.log_rest)
        slopes = on_support(self.divergence, self.tail, log_p, rows.log_q, rest)
        entropy, log_sampled = rows.entropy(), rows.log_sampled[:, 0]
        scale, metrics = clamp_scale(slopes.value, self.clamp)
        p, p_rest = log_p.exp(), log_rest.exp()
        metrics["teacher_topk_mass"] = p.sum(-1)
        metrics["student_topk_mass"] = rows.log_q.exp().sum(-1)
        metrics["teacher_entropy"] = torch.special.entr(torch.cat([p, p_rest], -1)).sum(-1)
        if overlap is not None:
            metrics["topk_overlap"] = overlap

        def close(factor: torch.Tensor, sampled: torch.Tensor | None) -> None:
            factor = (factor * scale)[:, None]
            of_rest = None if slopes.rest is None else slopes.rest * factor
            of_sampled = None if sampled is None else sampled[:, None]
            rows.close(slopes.slope * factor, of_rest, of_sampled)

        teacher_sampled = tokens.teacher_logprobs.to(logits.dtype)
        return Opened(slopes.value * scale, entropy, log_sampled, teacher_sampled, metrics, close)


@dataclass(frozen=True)
class OnVocabulary(Term):
    """A divergence over the whole vocabulary, from the teacher's own logits."""

    divergence: DivergenceFunction
    clamp: float | None

    def open(self, logits: torch.Tensor, tokens: Tokens, teacher: torch.Tensor | None) -> Opened:
        """ValueError without the teacher's logits."""
        if teacher is None:
            raise ValueError("this objective needs the teacher's hidden states and its head")
        rows = FullRows(logits, teacher, tokens.targets[:, None])
        value, slope = self.divergence(rows.log_p, rows.log_q)
        entropy, log_sampled = rows.entropy(), rows.log_sampled[:, 0]
        teacher_sampled = rows.teacher_sampled[:, 0]
        scale, metrics = clamp_scale(value, self.clamp)
        metrics["teacher_entropy"] = entropy_of(rows.log_p)[:, 0]
        metrics["agreement"] = teacher_sampled - tokens.rollout_logprobs.to(logits.dtype)

        def close(factor: torch.Tensor, sampled: torch.Tensor | None) -> None:
            slope.mul_((factor * scale)[:, None])
            rows.close(slope, None if sampled is None else sampled[:, None])

        return Opened(value * scale, entropy, log_sampled, teacher_sampled, metrics, close)


def topk_overlap(logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """|top-k of the logits [n, V] ∩ ids [n, k]| / k, [n]; NaN in all but every 16th row.

    The rows that are measured are a systematic sample of the tile's, its first row among them.
    """
    overlap = logits.new_full((len(logits),), torch.nan)
    wanted = ids[::OVERLAP_EVERY]
    own = logits[::OVERLAP_EVERY].topk(min(ids.shape[-1], logits.shape[-1]), sorted=False).indices
    found = (own[:, :, None] == wanted[:, None, :]).any(1)
    overlap[::OVERLAP_EVERY] = found.to(logits.dtype).mean(-1)
    return overlap


def clamp_scale(value: torch.Tensor, clamp: float | None) -> tuple[torch.Tensor, Metrics]:
    """min(1, clamp / value) [n], held constant: scales a larger loss and its gradient down."""
    if clamp is None:
        return torch.ones_like(value), {}
    return clamp / value.clamp_min(clamp), {"clamped": value > clamp}
