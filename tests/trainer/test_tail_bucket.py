"""The bucket for what the support leaves out, where float32 has no digits left."""

from __future__ import annotations

import pytest
import torch

from tests.trainer.oracle import Case, loss_of, term
from trainer.losses import ForwardKL, Tokens

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
    one, own = torch.ones(1), teacher[:, 0]
    tokens = Tokens(torch.tensor([0]), own, one, own, ids, teacher[:, :SUPPORT])
    return loss_of(term(ForwardKL(), "bucket"), Case(logits, teacher, tokens))


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


@pytest.mark.parametrize("distance", [100.0, 1000.0])
def test_a_student_that_leaves_the_outside_nothing_in_float32_is_still_pulled(
    distance: float,
) -> None:
    logits = torch.tensor([[3.0, 2.0, 1.0, 0.0, *[-distance] * 4]], requires_grad=True)
    (gradient,) = torch.autograd.grad(bucketed(logits), logits)
    outside = TEACHER[:, SUPPORT:].exp().sum() / 4
    assert torch.allclose(gradient[:, SUPPORT:], -outside.float(), rtol=1e-4)


def test_a_support_of_the_whole_vocabulary_has_no_bucket() -> None:
    logits = torch.randn(3, 8, dtype=torch.float32, requires_grad=True)
    log_q = logits.detach().log_softmax(-1)
    best = log_q.topk(8, dim=-1)
    tokens = Tokens(
        torch.zeros(3).long(), log_q[:, 0], torch.ones(3), log_q[:, 0], best.indices, best.values
    )
    loss = loss_of(term(ForwardKL(), "bucket"), Case(logits, log_q, tokens))
    assert loss.item() == pytest.approx(0.0, abs=1e-6)
