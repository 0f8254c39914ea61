"""The distillation loss of a tile of rows: opened, weighed by somebody else, closed.

logits ──open──► values, log q of the sampled tokens ──factors──► close ──► gradient
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod

import torch

from trainer.losses.base import DivergenceFunction, Tokens
from trainer.losses.estimators import SampledLoss, SampledSlopes
from trainer.losses.rows import FullRows, SupportRows
from trainer.losses.support import Tail, on_support

Metrics = dict[str, torch.Tensor]


class Opened(ABC):
    """Rows whose losses are known: ``value`` [n], log q and log p of the sampled tokens [n].

    ``entropy`` [n] is the student's, over its whole vocabulary, in nats.
    """

    value: torch.Tensor
    entropy: torch.Tensor
    log_sampled: torch.Tensor
    teacher_sampled: torch.Tensor
    metrics: Metrics

    @abstractmethod
    def close(self, factor: torch.Tensor, sampled: torch.Tensor | None) -> None:
        """Overwrites the logits by the gradient of Σ factor · value, and of ``sampled``.

        ``factor`` [n]; ``sampled`` [n] is a slope by log q of the sampled tokens, of another loss.
        """


class Term(ABC):
    """A distillation loss per token."""

    needs_heads = False

    @abstractmethod
    def open(self, logits: torch.Tensor, tokens: Tokens, teacher: torch.Tensor | None) -> Opened:
        """Takes the logits [n, V] over, and the teacher's [n, V_teacher] where it needs them."""


class MetricsOnly:
    """No loss: the sampled token is only watched."""

    def __call__(self, log_p: torch.Tensor, log_q: torch.Tensor) -> SampledSlopes:
        nothing = torch.zeros_like(log_q)
        return SampledSlopes(nothing, nothing)


class Sampled(Term):
    """A loss of the sampled token alone; ``floor`` is the least log p, in nats."""

    def __init__(self, loss: SampledLoss, floor: float = -math.inf) -> None:
        self._loss = loss
        self._floor = floor

    def open(self, logits: torch.Tensor, tokens: Tokens, teacher: torch.Tensor | None) -> Opened:
        return _OpenedSampled(self._loss, self._floor, logits, tokens)


class _OpenedSampled(Opened):
    def __init__(
        self, loss: SampledLoss, floor: float, logits: torch.Tensor, tokens: Tokens
    ) -> None:
        assert tokens.teacher_logprobs is not None
        targets = tokens.targets[:, None]
        self._rows = SupportRows(logits, targets, targets)
        self.entropy, self.log_sampled = self._rows.entropy(), self._rows.log_sampled[:, 0]
        self.teacher_sampled = tokens.teacher_logprobs.to(logits.dtype).clamp_min(floor)
        slopes = loss(self.teacher_sampled, self.log_sampled)
        self.value, self._slope = slopes.value, slopes.slope
        self.metrics = {} if slopes.clamped is None else {"clamped": slopes.clamped}

    def close(self, factor: torch.Tensor, sampled: torch.Tensor | None) -> None:
        slope = self._slope * factor
        if sampled is not None:
            slope = slope + sampled
        self._rows.close(slope[:, None], None, None)


class OnTopK(Term):
    """A divergence over k tokens a row, the teacher's or the student's best."""

    def __init__(self, divergence: DivergenceFunction, tail: Tail, clamp: float | None) -> None:
        self._divergence = divergence
        self._tail: Tail = tail
        self._clamp = clamp

    def open(self, logits: torch.Tensor, tokens: Tokens, teacher: torch.Tensor | None) -> Opened:
        """ValueError without a top-k support and the logarithm of its rest."""
        if tokens.teacher_ids is None or tokens.teacher_rest_logprobs is None:
            raise ValueError("this objective needs a top-k support and the logarithm of its rest")
        return _OpenedTopK(self._divergence, self._tail, self._clamp, logits, tokens)


class _OpenedTopK(Opened):
    def __init__(
        self,
        divergence: DivergenceFunction,
        tail: Tail,
        clamp: float | None,
        logits: torch.Tensor,
        tokens: Tokens,
    ) -> None:
        assert tokens.teacher_ids is not None
        assert tokens.teacher_topk_logprobs is not None
        assert tokens.teacher_rest_logprobs is not None
        assert tokens.teacher_logprobs is not None
        ids = tokens.teacher_ids
        whole = ids.shape[-1] >= logits.shape[-1]
        self._rows = rows = SupportRows(logits, ids, tokens.targets[:, None])
        log_p = tokens.teacher_topk_logprobs.to(logits.dtype)
        log_rest = tokens.teacher_rest_logprobs.to(logits.dtype)[:, None]
        rest = None if whole else (log_rest, rows.log_rest)
        self._slopes = on_support(divergence, tail, log_p, rows.log_q, rest)
        self.entropy, self.log_sampled = rows.entropy(), rows.log_sampled[:, 0]
        self.teacher_sampled = tokens.teacher_logprobs.to(logits.dtype)
        self._scale, self.metrics = clamp_scale(self._slopes.value, clamp)
        self.value = self._slopes.value * self._scale
        self.metrics["teacher_topk_mass"] = log_p.exp().sum(-1)

    def close(self, factor: torch.Tensor, sampled: torch.Tensor | None) -> None:
        factor = (factor * self._scale)[:, None]
        slopes = self._slopes
        rest = None if slopes.rest is None else slopes.rest * factor
        more = None if sampled is None else sampled[:, None]
        self._rows.close(slopes.slope * factor, rest, more)


class OnVocabulary(Term):
    """A divergence over the whole vocabulary, from the teacher's own logits."""

    needs_heads = True

    def __init__(self, divergence: DivergenceFunction, clamp: float | None) -> None:
        self._divergence = divergence
        self._clamp = clamp

    def open(self, logits: torch.Tensor, tokens: Tokens, teacher: torch.Tensor | None) -> Opened:
        """ValueError without the teacher's logits."""
        if teacher is None:
            raise ValueError("this objective needs the teacher's hidden states and its head")
        return _OpenedVocabulary(self._divergence, self._clamp, logits, teacher, tokens)


class _OpenedVocabulary(Opened):
    def __init__(
        self,
        divergence: DivergenceFunction,
        clamp: float | None,
        logits: torch.Tensor,
        teacher: torch.Tensor,
        tokens: Tokens,
    ) -> None:
        self._rows = rows = FullRows(logits, teacher, tokens.targets[:, None])
        value, self._slope = divergence(rows.log_p, rows.log_q)
        self.entropy, self.log_sampled = rows.entropy(), rows.log_sampled[:, 0]
        self.teacher_sampled = rows.teacher_sampled[:, 0]
        self._scale, self.metrics = clamp_scale(value, clamp)
        self.value = value * self._scale
        self.metrics["agreement"] = self.teacher_sampled - tokens.rollout_logprobs.to(logits.dtype)

    def close(self, factor: torch.Tensor, sampled: torch.Tensor | None) -> None:
        self._slope.mul_((factor * self._scale)[:, None])
        self._rows.close(self._slope, None if sampled is None else sampled[:, None])


def clamp_scale(value: torch.Tensor, clamp: float | None) -> tuple[torch.Tensor, Metrics]:
    """min(1, clamp / value), held constant: a larger loss is scaled down, gradient and all."""
    if clamp is None:
        return torch.ones_like(value), {}
    return clamp / value.clamp_min(clamp), {"clamped": value > clamp}
