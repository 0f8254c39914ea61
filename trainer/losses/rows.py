"""Rows of logits that become log-probabilities and then their gradient, in the same memory.

    logits z [n, V] ──open──► log q of a loss's outcomes ──slopes──► close ──► ∂loss/∂z [n, V]

With slopes g_i = ∂loss/∂log q_i and log q_i = z_i - lse(z), the gradient is

    ∂loss/∂z_j = g_j - q_j Σ_i g_i

so that a loss needs only the outcomes that it depends on, not the whole vocabulary.
"""

from __future__ import annotations

import torch


class SupportRows:
    """Rows of a loss that depends on k tokens, the rest as one outcome, and the sampled token."""

    def __init__(self, logits: torch.Tensor, ids: torch.Tensor, targets: torch.Tensor) -> None:
        """``ids`` [n, k] are distinct in a row; ``targets`` [n, 1]. The logits are overwritten."""
        picked, sampled = logits.gather(-1, ids), logits.gather(-1, targets)
        logits.scatter_(-1, ids, -torch.inf)
        # exp(z - peak) with the rest's own peak: with the support's, a small rest would round to 0.
        lowest = torch.finfo(logits.dtype).min
        peak = logits.amax(-1, keepdim=True).clamp_min(lowest)
        shifted = (logits - peak).clamp_min_(lowest)  # finite: times exp(-inf) = 0 it adds 0
        torch.exp(shifted, out=logits)
        mass = logits.sum(-1, keepdim=True)
        # -Σ w log w of w = exp(z - peak), without a logarithm of each w
        self._outside = -shifted.mul_(logits).sum(-1, keepdim=True)
        rest = peak + mass.log()
        total = torch.logaddexp(rest, picked.logsumexp(-1, keepdim=True))
        self.log_q = picked - total
        self.log_rest = rest - total
        self.log_sampled = sampled - total
        self._logits, self._ids, self._targets = logits, ids, targets
        self._log_scale, self._mass = peak - total, mass
        self._scale = self._log_scale.exp()

    def entropy(self) -> torch.Tensor:
        """-Σ q log q over the whole vocabulary, [n], nats; before ``close``."""
        rest = self._scale * self._outside - self.log_rest.exp() * self._log_scale
        return (rest + entropy_of(self.log_q))[:, 0]

    def close(
        self, slope: torch.Tensor, rest: torch.Tensor | None, sampled: torch.Tensor | None
    ) -> None:
        """Overwrites the logits by the gradient of slopes [n, k], [n, 1] and [n, 1].

        Each token j outside of the support gets g q_j / Q_rest of the rest's slope g.
        """
        pull = slope.sum(-1, keepdim=True)
        for more in (rest, sampled):
            if more is not None:
                pull = pull + more
        scale = -pull * self._scale
        if rest is not None:
            scale = scale + rest / self._mass
        own = slope - self.log_q.exp() * pull
        if rest is None and sampled is None and slope.shape[-1] == 1:
            own = slope * self.log_rest.exp()  # 1 - q, where q rounds to 1
        self._logits.mul_(scale)
        self._logits.scatter_(-1, self._ids, own)
        if sampled is not None:
            self._logits.scatter_add_(-1, self._targets, sampled)


class FullRows:
    """Rows of a loss that depends on all columns that student and teacher share.

    Vocabularies may be padded differently: a divergence normalizes both sides over the first
    ``min(V, V_teacher)`` columns; log q of the sampled token is normalized over all V columns of
    the student.
    """

    def __init__(
        self, logits: torch.Tensor, teacher_logits: torch.Tensor, targets: torch.Tensor
    ) -> None:
        """``targets`` [n, 1] are columns of both sides. Both sides' logits are overwritten."""
        columns = min(logits.shape[-1], teacher_logits.shape[-1])
        self._common, self._padding = logits[:, :columns], logits[:, columns:]
        teacher = teacher_logits[:, :columns]
        common, teacher_total = _lse(self._common), _lse(teacher)
        self.log_p, self.log_q = teacher.sub_(teacher_total), self._common.sub_(common)
        self._log_share = torch.zeros_like(common)
        if self._padding.shape[-1]:
            total = torch.logaddexp(common, _lse(self._padding))
            self._padding.sub_(total)
            self._log_share = common - total
        self.log_sampled = self.log_q.gather(-1, targets) + self._log_share
        self.teacher_sampled = self.log_p.gather(-1, targets)
        self._logits, self._targets = logits, targets

    def entropy(self) -> torch.Tensor:
        """-Σ q log q over all V columns of the student, [n], nats; before ``close``."""
        share = self._log_share.exp()
        common = share * (entropy_of(self._common) - self._log_share)
        return (common + entropy_of(self._padding))[:, 0]

    def close(self, slope: torch.Tensor, sampled: torch.Tensor | None) -> None:
        """Overwrites the logits by the gradient of slopes [n, columns] and [n, 1]."""
        pull = slope.sum(-1, keepdim=True)
        if sampled is not None:
            pull = pull + sampled * self._log_share.exp()
        torch.addcmul(slope, self._common.exp_(), pull, value=-1, out=self._common)
        if sampled is None:
            self._padding.zero_()
            return
        # Only log q of the sampled token is normalized over the padding: its slope reaches there.
        self._padding.exp_().mul_(-sampled)
        self._logits.scatter_add_(-1, self._targets, sampled)


def _lse(rows: torch.Tensor) -> torch.Tensor:
    return rows.logsumexp(-1, keepdim=True)


def entropy_of(log_q: torch.Tensor) -> torch.Tensor:
    """-Σ q log q of each row, [n, 1]; an outcome of probability 0 adds 0."""
    entropy: torch.Tensor = torch.special.entr(log_q.exp()).sum(-1, keepdim=True)
    return entropy
