"""Objectives against per-token float64 references, limits and numerical gradients."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any, Literal, get_args

import pytest
import torch

from async_opd.core.config import ForwardKLConfig, JSDConfig, K1Config, SampledConfig
from trainer.losses import (
    JSD,
    K1,
    ForwardKL,
    LossInputs,
    ReverseKL,
    SampledEstimator,
    TokenLoss,
    build_loss,
)

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
    with pytest.raises(ValueError, match="the teacher's top-k"):
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


def outcomes(x: LossInputs, tail: Tail) -> list[list[tuple[float, float]]]:
    """(p_i, q_i) of every outcome of every token, in plain Python floats."""
    assert x.teacher_ids is not None
    assert x.teacher_topk_logprobs is not None
    rows = []
    for t in range(len(x.targets)):
        p = [math.exp(v) for v in x.teacher_topk_logprobs[t].tolist()]
        q = [math.exp(x.logprobs[t, i].item()) for i in x.teacher_ids[t].tolist()]
        if tail == "renormalize":
            p, q = [v / sum(p) for v in p], [v / sum(q) for v in q]
        if tail == "bucket":
            p, q = [*p, 1 - sum(p)], [*q, 1 - sum(q)]
        rows.append(list(zip(p, q, strict=True)))
    return rows


@pytest.mark.parametrize("tail", TAILS)
def test_reverse_kl_equals_the_per_token_reference(tail: Tail) -> None:
    expected = sum(
        q * (math.log(q) - math.log(p)) for row in outcomes(inputs(), tail) for p, q in row
    )
    assert ReverseKL(tail)(inputs()).loss.item() == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("tail", TAILS)
@pytest.mark.parametrize("beta", [0.1, 0.5, 0.9])
def test_jsd_equals_the_per_token_reference(tail: Tail, beta: float) -> None:
    expected = 0.0
    for row in outcomes(inputs(), tail):
        for p, q in row:
            m = beta * p + (1 - beta) * q
            expected += beta * p * math.log(p / m) + (1 - beta) * q * math.log(q / m)
    assert JSD(beta, tail)(inputs()).loss.item() == pytest.approx(expected, rel=1e-10)


@pytest.mark.parametrize("tail", TAILS)
def test_jsd_at_0_is_forward_kl_and_at_1_reverse_kl(tail: Tail) -> None:
    x = inputs()
    assert JSD(0.0, tail)(x).loss.item() == ForwardKL(tail)(x).loss.item()
    assert JSD(1.0, tail)(x).loss.item() == ReverseKL(tail)(x).loss.item()


def test_jsd_over_beta_tends_to_forward_kl() -> None:
    x, beta = inputs(), 1e-6
    forward = ForwardKL("bucket")(x).loss.item()
    assert JSD(beta, "bucket")(x).loss.item() / beta == pytest.approx(forward, rel=1e-4)


def test_jsd_of_one_half_does_not_change_when_the_roles_do() -> None:
    x = inputs(k=V)
    assert x.teacher_ids is not None
    assert x.teacher_topk_logprobs is not None
    teacher = torch.empty_like(x.logprobs).scatter(-1, x.teacher_ids, x.teacher_topk_logprobs)
    student = x.logprobs.gather(-1, x.teacher_ids)
    swapped = LossInputs(teacher, x.targets, x.teacher_logprobs, x.teacher_ids, student)
    one, other = (JSD(0.5, "ignore")(y).loss.item() for y in (x, swapped))
    assert one == pytest.approx(other, rel=1e-12)


DIVERGENCES: list[TokenLoss] = [ReverseKL("bucket"), JSD(0.3, "bucket"), JSD(0.7, "renormalize")]
ESTIMATORS: list[TokenLoss] = [
    SampledEstimator("k2", "supervised", None),
    SampledEstimator("k3", "supervised", None),
    SampledEstimator("abs", "supervised", None),
]


@pytest.mark.parametrize("loss", [*DIVERGENCES, *ESTIMATORS])
def test_the_gradient_is_the_numerical_one(loss: TokenLoss) -> None:
    torch.manual_seed(5)
    logits = torch.randn(N, V, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda z: loss(inputs(logits=z)).loss, (logits,))


@pytest.mark.parametrize("loss", [*DIVERGENCES, *ESTIMATORS])
def test_equal_distributions_have_no_loss(loss: TokenLoss) -> None:
    assert loss(inputs(same=True)).loss.item() == pytest.approx(0.0, abs=1e-12)


@pytest.mark.parametrize("loss", [*DIVERGENCES, *ESTIMATORS])
def test_no_tokens_have_no_loss(loss: TokenLoss) -> None:
    assert loss(inputs(n=0)).loss.item() == 0.0


def expected_gradient(loss: TokenLoss, teacher: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
    """E over y ~ q of the estimator's gradient: every token with its probability."""
    total = torch.zeros_like(logits)
    q = logits.softmax(-1).detach()
    for token in range(V):
        y = torch.tensor([token])
        x = LossInputs(logits.log_softmax(-1), y, teacher[:, token], None, None)
        (gradient,) = torch.autograd.grad(loss(x).loss, logits)
        total += q[0, token] * gradient
    return total


@pytest.mark.parametrize(("kind", "target"), [("k2", "reverse"), ("k3", "forward"), ("abs", "l1")])
def test_a_supervised_estimator_follows_its_divergence_in_expectation(
    kind: Literal["k2", "k3", "abs"], target: str
) -> None:
    torch.manual_seed(2)
    logits = torch.randn(1, V, dtype=torch.float64, requires_grad=True)
    log_p = torch.randn(1, V, dtype=torch.float64).log_softmax(-1)
    log_q = logits.log_softmax(-1)
    p, q = log_p.exp(), log_q.exp()
    exact = {
        "reverse": (q * (log_q - log_p)).sum(),
        "forward": (p * (log_p - log_q)).sum(),
        "l1": (q - p).abs().sum(),
    }[target]
    (wanted,) = torch.autograd.grad(exact, logits)
    found = expected_gradient(SampledEstimator(kind, "supervised", None), log_p, logits)
    assert torch.allclose(found, wanted, atol=1e-12)


def test_a_policy_gradient_estimator_weights_log_q_by_its_negative_estimate() -> None:
    logits = torch.randn(N, V, dtype=torch.float64, requires_grad=True)
    x = inputs(logits=logits)
    gap = (x.sampled - x.teacher_logprobs).detach()
    result = SampledEstimator("k3", "policy_gradient", 0.7)(x)
    advantage = -(torch.exp(-gap) - 1 + gap)
    assert result.metrics["clamped"].item() == (advantage.abs() > 0.7).sum().item()
    wanted = -(advantage.clamp(-0.7, 0.7) * x.sampled).sum()
    assert result.loss.item() == pytest.approx(wanted.item())


def test_a_clamp_of_a_supervised_estimate_is_refused() -> None:
    with pytest.raises(ValueError, match="silently remove the gradient"):
        SampledConfig(kind="k2", clamp=1.0)


@pytest.mark.parametrize(
    ("config", "kind"),
    [(JSDConfig(kind="jsd"), JSD), (SampledConfig(kind="k2"), SampledEstimator)],
)
def test_every_config_builds_its_objective(config: Any, kind: type) -> None:
    assert isinstance(build_loss(config), kind)


def reference_k1(x: LossInputs, clamp: float) -> float:
    """Token by token, in plain Python floats."""
    total = 0.0
    for t, token in enumerate(x.targets.tolist()):
        log_q, log_p = x.logprobs[t, token].item(), x.teacher_logprobs[t].item()
        total -= max(-clamp, min(clamp, log_p - log_q)) * log_q
    return total


@pytest.mark.parametrize("clamp", [None, 0.3, 100.0])
def test_k1_equals_the_per_token_reference(clamp: float | None) -> None:
    expected = reference_k1(inputs(), clamp or math.inf)
    assert K1(clamp)(inputs()).loss.item() == pytest.approx(expected, rel=1e-12)


def test_k1_without_a_clamp_counts_no_clamped_tokens() -> None:
    assert K1(None)(inputs()).metrics == {}


def test_k1_of_no_tokens_is_zero() -> None:
    assert K1(0.5)(inputs(n=0)).loss.item() == 0.0


def test_k1_needs_no_top_k() -> None:
    x = inputs()
    sampled = LossInputs(x.logprobs, x.targets, x.teacher_logprobs, None, None)
    assert K1(None)(sampled).loss.item() == K1(None)(x).loss.item()


def test_the_clamp_of_k1_keeps_the_direction_of_the_gradient() -> None:
    torch.manual_seed(3)
    logits = torch.randn(1, V, dtype=torch.float64, requires_grad=True)
    x = inputs(logits=logits, n=1)
    (free,) = torch.autograd.grad(K1(None)(x).loss, logits, retain_graph=True)
    (bound,) = torch.autograd.grad(K1(1e-3)(x).loss, logits)
    assert torch.allclose(free / free.norm(), bound / bound.norm(), atol=1e-12)


@pytest.mark.parametrize("build", [ForwardKL, ReverseKL, partial(JSD, 0.5)])
def test_all_tails_agree_on_a_support_of_the_whole_vocabulary(
    build: Callable[[Tail], TokenLoss],
) -> None:
    losses = [build(tail)(inputs(k=V)).loss.item() for tail in TAILS]
    assert losses == pytest.approx([losses[0]] * len(TAILS), rel=1e-9)


@pytest.mark.parametrize("tail", ["bucket", "renormalize"])
def test_forward_kl_of_equal_distributions_has_no_gradient(tail: Tail) -> None:
    logits = torch.randn(N, V, dtype=torch.float64, requires_grad=True)
    (gradient,) = torch.autograd.grad(
        ForwardKL(tail)(inputs(logits=logits, same=True)).loss, logits
    )
    assert gradient.abs().max() < 1e-12


def test_ignore_has_the_gradient_of_the_truncated_cross_entropy() -> None:
    """q_j P - p_j on the support, q_j P outside, with P the teacher's mass on it."""
    logits = torch.randn(N, V, dtype=torch.float64, requires_grad=True)
    x = inputs(logits=logits)
    assert x.teacher_ids is not None
    assert x.teacher_topk_logprobs is not None
    (gradient,) = torch.autograd.grad(ForwardKL("ignore")(x).loss, logits)
    p = torch.zeros_like(gradient).scatter(-1, x.teacher_ids, x.teacher_topk_logprobs.exp())
    expected = logits.detach().softmax(-1) * p.sum(-1, keepdim=True) - p
    assert torch.allclose(gradient, expected, atol=1e-12)


@pytest.mark.parametrize("loss", [ReverseKL("bucket"), JSD(0.5, "bucket")])
def test_divergences_refuse_sampled_token_scores(loss: TokenLoss) -> None:
    x = inputs()
    with pytest.raises(ValueError, match="the teacher's top-k"):
        loss(LossInputs(x.logprobs, x.targets, x.teacher_logprobs, None, None))


@pytest.mark.parametrize(
    "loss", [ForwardKL("bucket"), K1(0.5), K1(None), *DIVERGENCES, *ESTIMATORS]
)
def test_a_loss_is_the_sum_of_its_tokens(loss: TokenLoss) -> None:
    x = inputs()
    alone = [
        loss(LossInputs(*(value[t : t + 1] for value in vars(x).values()))).loss.item()
        for t in range(N)
    ]
    assert loss(x).loss.item() == pytest.approx(sum(alone), rel=1e-12)
