"""Objectives against per-token float64 references, limits and numerical gradients."""

from __future__ import annotations

import math
from typing import Literal, get_args

import pytest
import torch

from async_opd.core.config import ForwardKLConfig, K1Config
from trainer.losses import K1, ForwardKL, LossInputs, build_loss

Tail = Literal["bucket", "ignore", "renormalize"]
TAILS = get_args(Tail)
N, V, K = 6, 11, 4


def inputs(
    seed: int = 0, k: int = K, n: int = N, logits: torch.Tensor | None = None, same: bool = False
) -> LossInputs:
    """Random student and teacher in float64; ``same`` makes them equal."""
    torch.manual_seed(seed)
    student = torch.randn(n, V, dtype=torch.float64) if logits is None else logits
    logprobs = student.log_softmax(-1)
    teacher = logprobs.detach() if same else torch.randn(n, V, dtype=torch.float64).log_softmax(-1)
    targets = torch.randint(0, V, (n,))
    best = teacher.topk(k, dim=-1)
    own = teacher.gather(-1, targets[:, None])[:, 0]
    return LossInputs(logprobs, targets, own, best.indices, best.values)


def reference_forward_kl(x: LossInputs, tail: Tail) -> float:
    """Token by token, in plain Python floats."""
    assert x.teacher_ids is not None
    assert x.teacher_topk_logprobs is not None
    total = 0.0
    for t in range(len(x.targets)):
        p = [math.exp(v) for v in x.teacher_topk_logprobs[t].tolist()]
        q = [math.exp(x.logprobs[t, i].item()) for i in x.teacher_ids[t].tolist()]
        mass_p, mass_q = sum(p), sum(q)
        if tail == "renormalize":
            p, q = [v / mass_p for v in p], [v / mass_q for v in q]
        total += sum(a * (math.log(a) - math.log(b)) for a, b in zip(p, q, strict=True))
        if tail == "bucket" and mass_p < 1 - 1e-9:
            total += (1 - mass_p) * (math.log(1 - mass_p) - math.log(1 - mass_q))
    return total


@pytest.mark.parametrize("tail", TAILS)
def test_forward_kl_equals_the_per_token_reference(tail: Tail) -> None:
    assert ForwardKL(tail)(inputs()).loss.item() == pytest.approx(
        reference_forward_kl(inputs(), tail), rel=1e-12
    )


@pytest.mark.parametrize("tail", TAILS)
def test_forward_kl_of_equal_distributions_is_zero(tail: Tail) -> None:
    assert ForwardKL(tail)(inputs(same=True)).loss.item() == pytest.approx(0.0, abs=1e-12)


@pytest.mark.parametrize("tail", TAILS)
def test_a_support_of_the_whole_vocabulary_gives_the_full_divergence(tail: Tail) -> None:
    x = inputs(k=V)
    assert x.teacher_ids is not None
    assert x.teacher_topk_logprobs is not None
    teacher = torch.empty_like(x.logprobs).scatter(-1, x.teacher_ids, x.teacher_topk_logprobs)
    full = torch.nn.functional.kl_div(x.logprobs, teacher, log_target=True, reduction="sum")
    assert ForwardKL(tail)(x).loss.item() == pytest.approx(full.item(), rel=1e-9)


@pytest.mark.parametrize("tail", TAILS)
def test_forward_kl_has_the_numerical_gradient(tail: Tail) -> None:
    logits = torch.randn(N, V, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda z: ForwardKL(tail)(inputs(logits=z)).loss, (logits,))


def test_a_bucketed_divergence_is_never_negative() -> None:
    assert all(ForwardKL("bucket")(inputs(seed, n=1)).loss.item() >= 0 for seed in range(50))


def test_a_negative_truncated_divergence_keeps_its_gradient() -> None:
    """Where the student puts more mass on the support than the teacher, the sum is negative."""
    logits = torch.tensor([[4.0, 3.0, 0.0, 0.0]], dtype=torch.float64, requires_grad=True)
    teacher = torch.tensor([[1.0, 0.5, 0.4, 0.3]], dtype=torch.float64).log_softmax(-1)
    x = LossInputs(
        logits.log_softmax(-1),
        torch.tensor([0]),
        teacher[:, 0],
        torch.tensor([[0, 1]]),
        teacher[:, :2],
    )
    loss = ForwardKL("ignore")(x).loss
    assert loss.item() < 0
    loss.backward()
    assert logits.grad is not None
    assert logits.grad.abs().max() > 1e-2


def test_the_mass_of_the_support_is_a_metric() -> None:
    x = inputs()
    assert x.teacher_topk_logprobs is not None
    mass = ForwardKL("bucket")(x).metrics["teacher_topk_mass"]
    assert mass.item() == pytest.approx(x.teacher_topk_logprobs.exp().sum().item())


def test_forward_kl_refuses_sampled_token_scores() -> None:
    x = inputs()
    with pytest.raises(ValueError, match="teacher's top-k"):
        ForwardKL("bucket")(LossInputs(x.logprobs, x.targets, x.teacher_logprobs, None, None))


@pytest.mark.parametrize("tail", TAILS)
def test_no_tokens_give_zero(tail: Tail) -> None:
    assert ForwardKL(tail)(inputs(n=0)).loss.item() == 0.0


def test_k1_has_the_gradient_of_the_policy_gradient() -> None:
    logits = torch.randn(N, V, dtype=torch.float64, requires_grad=True)
    x = inputs(logits=logits)
    K1(None)(x).loss.backward()
    q = logits.detach().softmax(-1)
    advantage = x.teacher_logprobs - x.sampled.detach()
    onehot = torch.nn.functional.one_hot(x.targets, V).double()
    expected = -advantage[:, None] * (onehot - q)
    assert torch.allclose(logits.grad, expected, atol=1e-12)  # type: ignore[arg-type]


def test_k1_of_equal_distributions_has_no_gradient() -> None:
    logits = torch.randn(N, V, dtype=torch.float64, requires_grad=True)
    K1(None)(inputs(logits=logits, same=True)).loss.backward()
    assert logits.grad is not None
    assert logits.grad.abs().max() < 1e-12


def test_k1_in_expectation_has_the_gradient_of_reverse_kl() -> None:
    """Summed over all tokens with weight q, it is the gradient of Σ q (log q - log p)."""
    torch.manual_seed(1)
    logits = torch.randn(1, V, dtype=torch.float64, requires_grad=True)
    teacher = torch.randn(1, V, dtype=torch.float64).log_softmax(-1)
    log_q = logits.log_softmax(-1)
    (exact,) = torch.autograd.grad((log_q.exp() * (log_q - teacher)).sum(), logits)
    estimate = torch.zeros_like(exact)
    for token in range(V):
        x = LossInputs(logits.log_softmax(-1), torch.tensor([token]), teacher[:, token], None, None)
        (gradient,) = torch.autograd.grad(K1(None)(x).loss, logits)
        estimate += log_q[0, token].exp().detach() * gradient
    assert torch.allclose(estimate, exact, atol=1e-12)


def test_the_clamp_bounds_the_advantage_and_counts_what_it_touches() -> None:
    x = inputs()
    advantage = x.teacher_logprobs - x.sampled
    result = K1(0.5)(x)
    assert result.metrics["clamped"].item() == (advantage.abs() > 0.5).sum().item()
    expected = -(advantage.clamp(-0.5, 0.5) * x.sampled).sum()
    assert result.loss.item() == pytest.approx(expected.item())


def test_the_config_names_the_objective() -> None:
    assert isinstance(build_loss(K1Config(kind="k1")), K1)
    assert isinstance(build_loss(ForwardKLConfig()), ForwardKL)
