"""What an objective gets and gives."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

import torch


@dataclass(frozen=True)
class LossInputs:
    """A chunk of N response tokens; V: vocabulary, k: the teacher's top-k.

    ``logprobs`` float32 [N, V] of the student, with gradient; ``targets`` [N] the sampled tokens;
    ``teacher_logprobs`` [N] of the sampled tokens; ``teacher_ids``, ``teacher_topk_logprobs``
    [N, k] by falling probability, or None.
    """

    logprobs: torch.Tensor
    targets: torch.Tensor
    teacher_logprobs: torch.Tensor
    teacher_ids: torch.Tensor | None
    teacher_topk_logprobs: torch.Tensor | None

    @property
    def sampled(self) -> torch.Tensor:
        """log q of the sampled tokens, [N], with gradient."""
        return self.logprobs.gather(-1, self.targets[:, None])[:, 0]


@dataclass(frozen=True)
class LossSums:
    """``loss`` is a scalar with gradient: the sum over tokens. ``metrics`` are sums over tokens."""

    loss: torch.Tensor
    metrics: dict[str, torch.Tensor] = field(default_factory=dict)


class TokenLoss(Protocol):
    """An objective that is a sum over response tokens."""

    def __call__(self, inputs: LossInputs) -> LossSums: ...
