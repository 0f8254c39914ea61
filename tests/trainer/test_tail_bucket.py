"""The bucket for what the support leaves out, where float32 has no digits left."""

from __future__ import annotations

import pytest
import torch

from trainer.losses import ForwardKL, LossInputs

SUPPORT = 4
TEACHER = torch.tensor([[0.5, 0.25, 0.15, 0.05, 0.0125, 0.0125, 0.0125, 0.0125]]).double().log()
"""5 % of the teacher's mass lies outside of the support."""


def collapsed(dtype: torch.dtype) -> torch.Tensor:
    """Logits [1, 8] of a student with all but 1e-10 of its mass on the support."""
    logits = torch.tensor([[25.0, 24.0, 23.0, 22.0, 0.0, 0.0, 0.0, 0.0]], dtype=dtype)
    return logits.requires_grad_()


def bucketed(logits: torch.Tensor) -> torch.Tensor:
    teacher = TEACHER.to(logits.dtype)
    ids = torch.arange(SUPPORT)[None]
    logprobs, own = logits.log_softmax(-1), teacher[:, 0]
    inputs = LossInputs(logprobs, torch.tensor([0]), own, ids, teacher[:, :SUPPORT])
    return ForwardKL("bucket")(inputs).loss


def exact(logits: torch.Tensor) -> torch.Tensor:
    """Σ_S p (log p - log q) + P' (log P' - log Q'), with the outside summed directly."""
    log_q = logits.log_softmax(-1)
    inside = (TEACHER[:, :SUPPORT].exp() * (TEACHER - log_q)[:, :SUPPORT]).sum()
    rest_p, rest_q = TEACHER[:, SUPPORT:].logsumexp(-1), log_q[:, SUPPORT:].logsumexp(-1)
    return inside + (rest_p.exp() * (rest_p - rest_q)).sum()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_collapsed_student_has_the_exact_loss(dtype: torch.dtype) -> None:
    expected = exact(collapsed(torch.float64)).item()
    assert bucketed(collapsed(dtype)).item() == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_collapsed_student_is_still_pulled_to_the_outside(dtype: torch.dtype) -> None:
    logits, reference = collapsed(dtype), collapsed(torch.float64)
    (gradient,) = torch.autograd.grad(bucketed(logits), logits)
    (expected,) = torch.autograd.grad(exact(reference), reference)
    assert torch.allclose(gradient.double(), expected, rtol=1e-4, atol=1e-7)


def test_a_support_of_the_whole_vocabulary_has_no_bucket() -> None:
    logits = torch.randn(3, 8, dtype=torch.float32, requires_grad=True)
    log_q = logits.log_softmax(-1)
    best = log_q.detach().topk(8, dim=-1)
    inputs = LossInputs(log_q, torch.zeros(3).long(), log_q[:, 0], best.indices, best.values)
    assert ForwardKL("bucket")(inputs).loss.item() == pytest.approx(0.0, abs=1e-6)
