"""The bucket for what the support leaves out, where float32 has no digits left."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from async_opd.core.scores import CandidateLogprobs, TopK
from tests.trainer.models import random_sample
from tests.trainer.oracle import DIVERGENCES, DOUBLE, Case, divergences, gradients, loss_of, term
from trainer.batches.packing import MIN_REST_MASS, estimate_log_rest, pack
from trainer.losses import ForwardKL
from trainer.losses.base import Tokens

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
    rest = teacher[:, SUPPORT:].logsumexp(-1)
    tokens = Tokens(torch.tensor([0]), own, one, own, ids, teacher[:, :SUPPORT], rest)
    return loss_of(term(ForwardKL(), "bucket"), Case(logits, teacher, tokens))


def exact(logits: torch.Tensor) -> torch.Tensor:
    """Σ_S p (log p - log q) + P' (log P' - log Q'), with the outside summed directly."""
    log_q = logits.log_softmax(-1)
    inside = (TEACHER[:, :SUPPORT].exp() * (TEACHER - log_q)[:, :SUPPORT]).sum()
    rest_p, rest_q = TEACHER[:, SUPPORT:].logsumexp(-1), log_q[:, SUPPORT:].logsumexp(-1)
    return inside + (rest_p.exp() * (rest_p - rest_q)).sum()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_collapsed_student_has_the_exact_loss_and_pull(dtype: torch.dtype) -> None:
    logits, reference = collapsed(dtype), collapsed(torch.float64)
    loss, expected = bucketed(logits), exact(reference)
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
    (gradient,) = torch.autograd.grad(loss, logits)
    (exactly,) = torch.autograd.grad(expected, reference)
    assert torch.allclose(gradient.double(), exactly, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("distance", [100.0, 1000.0])
def test_a_student_that_leaves_nothing_in_float32_is_still_pulled(distance: float) -> None:
    logits = torch.tensor([[3.0, 2.0, 1.0, 0.0, *[-distance] * 4]], requires_grad=True)
    (gradient,) = torch.autograd.grad(bucketed(logits), logits)
    outside = TEACHER[:, SUPPORT:].exp().sum() / 4
    assert torch.allclose(gradient[:, SUPPORT:], -outside.float(), rtol=1e-4)


def test_a_support_of_all_tokens_has_no_bucket_and_another_needs_the_rest() -> None:
    logits = torch.randn(3, 8, dtype=torch.float32, requires_grad=True)
    log_q = logits.detach().log_softmax(-1)
    best = log_q.topk(8, dim=-1)
    tokens = Tokens(
        torch.zeros(3).long(),
        log_q[:, 0],
        torch.ones(3),
        log_q[:, 0],
        best.indices,
        best.values,
        torch.full((3,), -torch.inf),
    )
    loss = loss_of(term(ForwardKL(), "bucket"), Case(logits, log_q, tokens))
    assert loss.item() == pytest.approx(0.0, abs=1e-6)
    x = problem(1e-3, 1e-3, DOUBLE).having(teacher_rest_logprobs=None)
    with pytest.raises(ValueError, match="needs a top-k support and the logarithm of its rest"):
        loss_of(term(ForwardKL(), "bucket"), x)


# ── a mass that 1 - P does not know ────────────────────────────────────────────────────────────

MASSES = [1e-3, 1e-5, 1e-7, 1e-10, 1e-20, 1e-30]
COLUMNS, K = 40, 6


def concentrated(mass: float, seed: int, dtype: torch.dtype) -> torch.Tensor:
    """Logits [3, 40] that leave ``mass`` outside of the first 6 columns."""
    torch.manual_seed(seed)
    logits = torch.randn(3, COLUMNS, dtype=DOUBLE)
    inside, outside = (part.logsumexp(-1, keepdim=True) for part in logits.split([K, 34], -1))
    logits[:, K:] += inside - outside + np.log(mass) - np.log1p(-mass)
    return logits.to(dtype)


def problem(student: float, teacher: float, dtype: torch.dtype) -> Case:
    """Both sides with these masses outside; what a teacher sends is float32."""
    table = concentrated(teacher, 1, DOUBLE).log_softmax(-1)
    ids = torch.arange(K).expand(3, K)
    sent = table[:, :K], table[:, K:].logsumexp(-1)
    topk, rest = (part.float().to(dtype) for part in sent)
    own = table[:, 0].to(dtype)
    ones = torch.ones(3, dtype=dtype)
    tokens = Tokens(torch.zeros(3).long(), own, ones, own, ids, topk, rest)
    return Case(concentrated(student, 2, dtype).requires_grad_(), table, tokens)


@pytest.mark.parametrize("teacher", MASSES)
@pytest.mark.parametrize("student", MASSES)
@pytest.mark.parametrize("kind", DIVERGENCES)
def test_a_bucket_of_any_mass_is_as_in_float64(kind: str, student: float, teacher: float) -> None:
    """Of the outside's own gradient too, relative to the largest there or to its mass."""
    single, exact = (problem(student, teacher, dtype) for dtype in (torch.float32, DOUBLE))
    loss = loss_of(term(DIVERGENCES[kind], "bucket"), single)
    expected = divergences(kind, exact, "bucket", exact.logits).sum()
    assert loss.item() == pytest.approx(expected.item(), rel=2e-5)
    (ours,) = gradients(loss, by=single.logits)
    (theirs,) = gradients(expected, by=exact.logits)
    for part, mass in ((slice(0, K), 1.0), (slice(K, None), max(student, teacher))):
        error = (ours[:, part] - theirs[:, part]).abs().max()
        assert error <= 1e-4 * theirs[:, part].abs().max() + 1e-6 * mass


# ── a teacher that cannot tell ─────────────────────────────────────────────────────────────────


@given(st.floats(MIN_REST_MASS, 0.5), st.integers(0, 99))
def test_a_rest_that_was_not_sent_is_what_the_support_leaves_of_one(mass: float, seed: int) -> None:
    table = concentrated(mass, seed, DOUBLE).log_softmax(-1)
    found = estimate_log_rest(table[:, :K].float().numpy())
    assert found == pytest.approx(np.log(mass), abs=1e-6 / mass + 1e-6)


@pytest.mark.parametrize("mass", [1e-7, 1e-12, 0.0])
def test_a_rest_that_was_not_sent_is_never_the_difference_of_roundings(mass: float) -> None:
    logprobs = np.float32(np.log([[0.7 - mass, 0.2, 0.1], [0.7, 0.2, 0.1 + 3e-7]]))
    assert estimate_log_rest(logprobs).tolist() == [np.float32(np.log(MIN_REST_MASS))] * 2


@pytest.mark.parametrize("kind", [TopK, CandidateLogprobs])
def test_samples_with_and_without_a_rest_are_packed_together(kind: Any) -> None:
    sent = random_sample(0, 3, k=4)
    known: Any = sent.scores
    arrays = known.ids, known.logprobs, known.sampled_logprobs
    told = replace(sent, scores=kind(*arrays, known.rest_logprobs))
    untold = replace(sent, scores=kind(*arrays))
    rest = pack([told, untold]).tokens.teacher_rest_logprobs
    assert torch.equal(rest[:3], torch.from_numpy(known.rest_logprobs))
    assert torch.allclose(rest[3:], rest[:3], atol=1e-5)
