"""Objectives against float64 autograd and per-token references, limits and numerical gradients."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from async_opd.config.sections.loss import ForwardKLConfig, K1Config, RewardConfig, SampledConfig
from tests.properties import examples
from tests.trainer.oracle import (
    DIVERGENCES,
    DOUBLE,
    ESTIMATES,
    Case,
    Tail,
    assert_same,
    case,
    config_of,
    divergences,
    estimate,
    gradients,
    loss_of,
    plain,
    run,
    term,
)
from trainer.losses import (
    K1,
    ClippedSurrogate,
    ForwardKL,
    MetricsOnly,
    MixedKL,
    Objective,
    OnTopK,
    OnVocabulary,
    ReverseKL,
    Sampled,
    SampledEstimator,
    Term,
    build_objective,
    jsd,
)

TAILS: list[Tail] = ["bucket", "ignore", "renormalize"]
SUPPORTS: list[Tail | None] = [*TAILS, None]
ESTIMATORS = [
    build_objective(config_of(kind)).term
    for kind in ESTIMATES
    if config_of(kind).gradient == "supervised"
]
BINARY = Sampled(SampledEstimator("binary_kl", "supervised", None))
every_kind = pytest.mark.parametrize("kind", DIVERGENCES)
every_support = pytest.mark.parametrize("tail", SUPPORTS)


# ── divergences: support × tail ────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("of", ["teacher", "student"])
@every_support
@every_kind
def test_a_divergence_and_its_gradient_are_autograds(kind: str, tail: Tail | None, of: str) -> None:
    x, weights = case(of=of), torch.tensor([0.0, 2.0, 0.5, 1.0, 0.0, 3.0], dtype=DOUBLE)
    expected = divergences(kind, x, tail, x.logits)
    loss, metrics = run(term(DIVERGENCES[kind], tail), x.having(weights=weights).on(tail))
    assert torch.allclose(metrics["distillation"], expected, atol=1e-12)
    assert_same(loss, (weights * expected).sum(), by=x.logits)


@examples(60)
@given(
    n=st.integers(0, 5),
    v=st.integers(2, 17),
    k=st.integers(1, 17),
    seed=st.integers(0, 99),
    kind=st.sampled_from(sorted(DIVERGENCES)),
    tail=st.sampled_from(SUPPORTS),
    of=st.sampled_from(["teacher", "student"]),
)
def test_any_shape_has_the_loss_and_gradient_of_autograd(
    n: int, v: int, k: int, seed: int, kind: str, tail: Tail | None, of: str
) -> None:
    x = case(seed, n, v, min(k, v), of=of)
    expected = divergences(kind, x, tail, x.logits).sum()
    loss = loss_of(term(DIVERGENCES[kind], tail), x.on(tail))
    assert_same(loss, expected, by=x.logits, atol=1e-9)


@every_support
@every_kind
def test_a_divergence_has_the_numerical_gradient(kind: str, tail: Tail | None) -> None:
    x = case(n=3).on(tail)
    loss = term(DIVERGENCES[kind], tail)
    assert torch.autograd.gradcheck(lambda z: loss_of(loss, x, z), (x.logits,))


def of_jsd(beta: float, p: float, q: float) -> float:
    m = beta * p + (1 - beta) * q
    return beta * p * math.log(p / m) + (1 - beta) * q * math.log(q / m)


PER_TOKEN: dict[str, tuple[Any, Any]] = {
    "forward KL": (ForwardKL(), lambda p, q: p * (math.log(p) - math.log(q))),
    "reverse KL": (ReverseKL(), lambda p, q: q * (math.log(q) - math.log(p))),
    **{f"JSD {b}": (jsd(b), lambda p, q, b=b: of_jsd(b, p, q)) for b in (0.1, 0.5, 0.9)},
}


@every_support
@pytest.mark.parametrize("name", PER_TOKEN)
def test_a_divergence_equals_the_per_token_reference(name: str, tail: Tail | None) -> None:
    x, (divergence, formula) = case(), PER_TOKEN[name]
    expected = sum(formula(p, q) for row in plain(x, tail) for p, q in row)
    assert loss_of(term(divergence, tail), x.on(tail)).item() == pytest.approx(expected, rel=1e-10)


@every_support
@every_kind
def test_equal_distributions_have_no_loss_and_no_pull(kind: str, tail: Tail | None) -> None:
    x = case(same=True).on(tail)
    loss = loss_of(term(DIVERGENCES[kind], tail), x)
    assert loss.item() == pytest.approx(0.0, abs=1e-12)
    if tail != "ignore":
        assert gradients(loss, by=x.logits)[0].abs().max() < 1e-12


@pytest.mark.parametrize("of", ["teacher", "student"])
@pytest.mark.parametrize("tail", TAILS)
@every_kind
def test_a_support_of_all_tokens_gives_the_full_divergence(kind: str, tail: Tail, of: str) -> None:
    x = case(k=11, of=of)
    some = loss_of(term(DIVERGENCES[kind], tail), x)
    full = loss_of(term(DIVERGENCES[kind], None), x.states())
    assert_same(some, full, by=x.logits, atol=1e-9)


ENDS: dict[str, tuple[Any, str]] = {
    "JSD 0": (jsd(0.0), "forward_kl"),
    "JSD 1": (jsd(1.0), "reverse_kl"),
    "mixed 0": (MixedKL(0), "reverse_kl"),
    "mixed 1": (MixedKL(1), "forward_kl"),
}


@every_support
@pytest.mark.parametrize("end", ENDS)
def test_jsd_and_mixed_kl_at_their_ends_are_a_kl(tail: Tail | None, end: str) -> None:
    x, (divergence, kind) = case().on(tail), ENDS[end]
    found, pure = (loss_of(term(one, tail), x) for one in (divergence, DIVERGENCES[kind]))
    assert found.item() == pure.item()
    assert torch.equal(*gradients(found, pure, by=x.logits))


@pytest.mark.parametrize("tail", ["bucket", "renormalize", None])
def test_jsd_over_beta_tends_to_forward_kl(tail: Tail | None) -> None:
    x, beta = case().on(tail), 1e-6
    forward = loss_of(term(ForwardKL(), tail), x).item()
    assert loss_of(term(jsd(beta), tail), x).item() / beta == pytest.approx(forward, abs=1e-4)


@pytest.mark.parametrize("divergence", [MixedKL(0.5), jsd(0.5)], ids=["mixed", "JSD"])
def test_of_one_half_a_divergence_does_not_change_when_the_roles_do(divergence: Any) -> None:
    log_p, log_q = (torch.randn(3, 7, dtype=DOUBLE).log_softmax(-1) for _ in range(2))
    assert torch.allclose(divergence(log_p, log_q)[0], divergence(log_q, log_p)[0], atol=1e-12)


@pytest.mark.parametrize(
    ("divergence", "infinite"),
    [(MixedKL(0.0), True), (MixedKL(0.3), True), (MixedKL(1.0), False), (ReverseKL(), True)],
)
def test_a_reverse_part_of_an_excluded_token_is_infinite(divergence: Any, infinite: bool) -> None:
    """0 times it is nothing."""
    x = case()
    x.tokens.teacher_topk_logprobs[2, 3] = -torch.inf
    assert math.isinf(loss_of(term(divergence, "bucket"), x).item()) is infinite


@pytest.mark.parametrize("seed", range(20))
@every_kind
def test_a_bucketed_divergence_is_never_negative(kind: str, seed: int) -> None:
    assert loss_of(term(DIVERGENCES[kind], "bucket"), case(seed, n=1)).item() >= 0


def test_a_negative_truncated_divergence_keeps_its_gradient() -> None:
    """Where the student puts more mass on the support than the teacher, the sum is negative."""
    logits = torch.tensor([[4.0, 3.0, 0.0, 0.0]], dtype=DOUBLE, requires_grad=True)
    teacher = torch.tensor([[1.0, 0.5, 0.4, 0.3]], dtype=DOUBLE).log_softmax(-1)
    ids = torch.tensor([[0, 1]])
    x = case(n=1, v=4).having(teacher_ids=ids, teacher_topk_logprobs=teacher[:, :2])
    loss = loss_of(term(ForwardKL(), "ignore"), Case(logits, teacher, x.tokens))
    assert loss.item() < 0
    assert gradients(loss, by=logits)[0].abs().max() > 1e-2


@pytest.mark.parametrize("seed", range(3))
def test_the_mass_on_the_support_is_that_of_plain_softmax(seed: int) -> None:
    x = case(seed)
    found = run(term(ForwardKL(), "bucket"), x)[1]
    q = np.exp(x.logits.detach().numpy() - x.logits.detach().logsumexp(-1, True).numpy())
    for key, table in (("student_topk_mass", q), ("teacher_topk_mass", x.teacher.exp().numpy())):
        expected = [sum(table[row, ids]) for row, ids in enumerate(x.tokens.teacher_ids.numpy())]
        assert found[key].tolist() == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("tail", [None, "bucket", "ignore"])
def test_the_teachers_entropy_is_that_of_its_outcomes(seed: int, tail: Tail | None) -> None:
    """Over a support, the tokens outside of it are one outcome, whatever the loss makes of them."""
    x = case(seed)
    found = run(term(ForwardKL(), tail), x.on(tail))[1]["teacher_entropy"]
    pairs = plain(x, "bucket" if tail is not None else None)
    expected = [-sum(p * math.log(p) for p, _ in row) for row in pairs]
    assert found.tolist() == pytest.approx(expected, abs=1e-9)


@pytest.mark.parametrize("k", [1, 4, 11])
def test_the_overlap_of_both_top_k_is_measured_in_every_16th_row(k: int) -> None:
    x = case(n=40, k=k)
    top = OnTopK(ForwardKL(), "bucket", None, overlap=True)
    logits = x.logits.detach().numpy().copy()
    found = top.open(x.logits.detach().clone(), x.tokens, None).metrics["topk_overlap"]
    measured = [row for row in range(40) if not math.isnan(found[row])]
    assert measured == [0, 16, 32]
    for row in measured:
        own = set(np.argsort(logits[row])[-k:].tolist())
        both = own & set(x.tokens.teacher_ids[row].tolist())
        assert found[row].item() == pytest.approx(len(both) / k)
    assert "topk_overlap" not in run(term(ForwardKL(), "bucket"), case())[1]  # of its own support


@pytest.mark.parametrize("tail", TAILS)
@pytest.mark.parametrize("kind", ["forward_kl", "jsd"])
def test_what_the_teacher_excludes_counts_as_nothing(kind: str, tail: Tail) -> None:
    x = case()
    excluded, tiny = (x.tokens.teacher_topk_logprobs.clone() for _ in range(2))
    excluded[2, 3], tiny[2, 3] = -torch.inf, -80.0
    losses = [
        loss_of(term(DIVERGENCES[kind], tail), x.having(teacher_topk_logprobs=logprobs))
        for logprobs in (excluded, tiny)
    ]
    assert_same(*losses, by=x.logits)


def test_scores_of_another_support_are_refused() -> None:
    with pytest.raises(ValueError, match="needs a top-k support"):
        loss_of(term(ForwardKL(), "bucket"), case().having(teacher_ids=None))
    with pytest.raises(ValueError, match="hidden states"):
        loss_of(term(ForwardKL(), None), case())


# ── vocabularies of different padding ──────────────────────────────────────────────────────────


@pytest.mark.parametrize(("student", "teacher"), [(11, 14), (14, 11)])
@every_kind
def test_both_are_normalized_over_the_common_rows(kind: str, student: int, teacher: int) -> None:
    torch.manual_seed(3)
    x = case(v=11)
    logits = torch.randn(6, student, dtype=DOUBLE, requires_grad=True)
    states = torch.randn(6, teacher, dtype=DOUBLE)
    y = Case(logits, states[:, :11].log_softmax(-1), x.tokens)
    expected = divergences(kind, y, None, logits[:, :11]).sum()
    loss = loss_of(term(DIVERGENCES[kind], None), replace(y, teacher=states).states())
    assert_same(loss, expected, by=logits)


# ── clamps ─────────────────────────────────────────────────────────────────────────────────────


@every_support
@every_kind
def test_a_clamped_divergence_keeps_its_direction(kind: str, tail: Tail | None) -> None:
    x = case()
    free = divergences(kind, x, tail, x.logits)
    bound = float(free.detach().median()) + 1e-6
    scale = (bound / free.detach()).where(free > bound, torch.ones(()).double())
    loss, metrics = run(term(DIVERGENCES[kind], tail, bound), x.on(tail))
    assert_same(loss, (free * scale).sum(), by=x.logits)
    assert metrics["distillation"].max().item() == pytest.approx(bound)
    assert metrics["clamped"].tolist() == (free > bound).tolist()


def test_a_clamp_leaves_a_negative_divergence_alone() -> None:
    x = case(seed=4)
    free, bound = (run(term(ReverseKL(), "ignore", c), x)[1] for c in (None, 1e-3))
    negative = free["distillation"] < 0
    assert negative.any()
    assert torch.equal(free["distillation"][negative], bound["distillation"][negative])


@pytest.mark.parametrize("clamp", [None, 0.3, 100.0])
def test_k1_equals_the_per_token_reference(clamp: float | None) -> None:
    x, limit = case(), clamp or math.inf
    gap = (x.tokens.teacher_logprobs - x.log_q()).detach()
    loss, metrics = run(Sampled(K1(clamp)), x)
    assert_same(loss, -(gap.clamp(-limit, limit) * x.log_q()).sum(), by=x.logits)
    assert ("clamped" in metrics) is (clamp is not None)
    if clamp is not None:
        assert metrics["clamped"].tolist() == (gap.abs() > clamp).tolist()


def test_a_clamp_of_a_supervised_estimate_is_refused() -> None:
    with pytest.raises(ValueError, match="silently remove the gradient"):
        SampledConfig(kind="k2", clamp=1.0)


# ── sampled tokens ─────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("loss", ESTIMATORS)
def test_a_supervised_estimator_has_the_numerical_gradient_and_limit(loss: Term) -> None:
    x = case(n=3)
    assert torch.autograd.gradcheck(lambda z: loss_of(loss, x, z), (x.logits,))
    assert loss_of(loss, case(same=True)).item() == pytest.approx(0.0, abs=1e-12)


def in_expectation(loss: Term | Objective, x: Case, log_mu: torch.Tensor) -> torch.Tensor:
    """E over y ~ mu of the loss's gradient: every token with its probability, [1, V]."""
    total = torch.zeros_like(x.logits)
    for token in range(x.logits.shape[-1]):
        y = x.having(
            targets=torch.tensor([token]),
            teacher_logprobs=x.teacher[:, token],
            rollout_logprobs=log_mu[:, token],
        )
        total += log_mu[0, token].exp() * gradients(loss_of(loss, y), by=x.logits)[0]
    return total


@pytest.mark.parametrize(
    ("loss", "target"),
    [
        (Sampled(K1(None)), "reverse_kl"),
        (Sampled(SampledEstimator("k2", "supervised", None)), "reverse_kl"),
        (Sampled(SampledEstimator("k3", "supervised", None)), "forward_kl"),
        (Sampled(SampledEstimator("abs", "supervised", None)), "l1"),
    ],
)
def test_an_estimator_follows_its_divergence_in_expectation(loss: Term, target: str) -> None:
    x = case(seed=2, n=1)
    exact = (
        (x.logits.softmax(-1) - x.teacher.exp()).abs().sum()
        if target == "l1"
        else divergences(target, x, None, x.logits).sum()
    )
    found = in_expectation(loss, x, x.logits.detach().log_softmax(-1))
    assert torch.allclose(found, gradients(exact, by=x.logits)[0], atol=1e-12)


@pytest.mark.parametrize("seed", range(3))
def test_binary_kl_is_reverse_kl_over_the_sampled_token_and_the_rest(seed: int) -> None:
    x = case(seed)
    ids = x.tokens.targets[:, None]
    x = x.having(
        teacher_ids=ids,
        teacher_topk_logprobs=x.tokens.teacher_logprobs[:, None],
        teacher_rest_logprobs=x.teacher.scatter(-1, ids, -torch.inf).logsumexp(-1),
    )
    assert_same(loss_of(BINARY, x), loss_of(term(ReverseKL(), "bucket"), x), by=x.logits)


@pytest.mark.parametrize("scale", [10.0, 14.0, 20.0])
def test_binary_kl_of_a_sure_student_is_as_exact_in_float32_as_its_logits(scale: float) -> None:
    x = case(n=5, v=40)
    sure = torch.nn.functional.one_hot(x.tokens.targets, 40) * scale
    logits = (x.logits.detach() + sure).float()
    exact = logits.double().requires_grad_()
    log_q = exact.log_softmax(-1)
    picked = x.tokens.targets[:, None]
    rest = log_q.scatter(-1, picked, -torch.inf).logsumexp(-1)
    log_p, log_q = x.tokens.teacher_logprobs, log_q.gather(-1, picked)[:, 0]
    expected = log_q.exp() * (log_q - log_p) + rest.exp() * (rest - torch.log1p(-log_p.exp()))
    rounded = logits.requires_grad_()
    loss, metrics = run(BINARY, x, rounded)
    assert torch.allclose(metrics["distillation"].double(), expected, rtol=1e-6, atol=0)
    ours, theirs = gradients(loss, by=rounded)[0].double(), gradients(expected.sum(), by=exact)[0]
    assert torch.allclose(ours, theirs, rtol=1e-5, atol=0)


@pytest.mark.parametrize("seed", range(5))
def test_binary_kl_is_never_above_reverse_kl(seed: int) -> None:
    x = case(seed, n=1)
    assert 0 <= loss_of(BINARY, x).item() <= divergences("reverse_kl", x, None, x.logits).item()


@pytest.mark.parametrize(("student", "rest"), [(0.0, -math.inf), (-1e-9, -20.7), (-20.0, 0.0)])
@pytest.mark.parametrize("teacher", [0.0, -1e-9, -20.0])
def test_binary_kl_of_certainties_is_finite(student: float, rest: float, teacher: float) -> None:
    estimator = SampledEstimator("binary_kl", "supervised", None)
    found = estimator(*(torch.tensor([log]) for log in (teacher, student, rest)))
    assert torch.isfinite(found.value).all()
    assert torch.isfinite(found.slope).all()


@pytest.mark.parametrize("kind", ESTIMATES)
def test_a_policy_gradient_estimator_weights_log_q_by_its_negative_estimate(kind: str) -> None:
    x = case()
    found = estimate(kind, x.tokens.teacher_logprobs, x.log_q()).detach()
    wanted = (found.clamp(-0.7, 0.7) * x.log_q()).sum()
    values = {"gradient": "policy_gradient", "clamp": 0.7, "importance": "off"}
    loss, metrics = run(build_objective(config_of(kind, **values)), x)
    ours, theirs = gradients(loss, wanted, by=x.logits)
    assert torch.allclose(ours, theirs, atol=1e-12)
    assert metrics["clamped"].tolist() == (found.abs() > 0.7).tolist()


@pytest.mark.parametrize("loss", [Sampled(K1(0.5)), *ESTIMATORS, term(ForwardKL(), "bucket")])
def test_no_tokens_have_no_loss(loss: Term) -> None:
    assert loss_of(loss, case(n=0)).item() == 0.0


# ── importance weights ─────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("temperature", [1.0, 0.6])
@every_support
def test_importance_weights_are_truncated_constants(tail: Tail | None, temperature: float) -> None:
    x = case()
    weights = x.ratio(temperature).detach()
    values = divergences("reverse_kl", x, tail, x.logits)
    objective = Objective(term(ReverseKL(), tail), importance_cap=1.1, temperature=temperature)
    loss, metrics = run(objective, x.on(tail))
    assert_same(loss, (weights.clamp_max(1.1) * values).sum(), by=x.logits)
    assert torch.allclose(metrics["importance"], weights, atol=1e-12)
    assert metrics["truncated"].tolist() == (weights > 1.1).tolist()


def test_a_fresh_sample_has_importance_one_at_any_temperature() -> None:
    x = case()
    y = x.having(rollout_logprobs=x.log_q(0.6).detach())
    metrics = run(Objective(Sampled(K1(None)), importance_cap=2.0, temperature=0.6), y)[1]
    assert torch.allclose(metrics["importance"], torch.ones(6, dtype=DOUBLE))
    assert metrics["rollout_gap"].max() < 1e-12


FRESH = torch.tensor([True, False, True, False, False, True])


@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize("tail", SUPPORTS)
def test_exact_weights_of_fresh_tokens_are_one_and_others_are_as_configured(
    tail: Tail | None, exact: bool
) -> None:
    x = case()
    x = replace(x, tokens=replace(x.tokens, fresh=FRESH))
    weights = x.ratio(1.0).detach().clamp_max(1.1)
    weights = torch.where(FRESH, 1.0, weights) if exact else weights
    wanted = (weights * divergences("reverse_kl", x, tail, x.logits)).sum()
    objective = Objective(term(ReverseKL(), tail), importance_cap=1.1, exact_when_fresh=exact)
    loss, metrics = run(objective, x.on(tail))
    ours, theirs = gradients(loss, wanted, by=x.logits)
    assert torch.allclose(ours, theirs, atol=1e-12)
    assert torch.allclose(metrics["importance_weight"], weights, atol=1e-12)
    assert torch.allclose(metrics["importance"], x.ratio(1.0), atol=1e-12), "it is measured as is"
    assert not (exact and metrics["truncated"][FRESH].any())


def test_the_config_says_which_weights_fresh_tokens_have() -> None:
    settings = {"kind": "k1", "importance_when_fresh": "exact"}
    assert build_objective(K1Config.model_validate(settings)).exact_when_fresh
    assert not build_objective(K1Config(kind="k1")).exact_when_fresh


def test_a_ratio_beyond_float32_is_truncated_like_any_other() -> None:
    x = case(n=2).having(rollout_logprobs=torch.tensor([-1e3, -0.5]))
    single = replace(x, logits=x.logits.detach().float().requires_grad_())
    loss, metrics = run(Objective(Sampled(K1(None)), importance_cap=2.0), single)
    assert math.isfinite(loss.item())
    assert metrics["importance"].isfinite().all()
    assert metrics["truncated"].tolist()[0]


def test_importance_weights_make_a_stale_sample_follow_the_current_student() -> None:
    """Σ_y mu(y) · (q/mu)(y) · ∇k1(y) is the gradient of KL(q ‖ p), for every mu."""
    x = case(seed=5, n=1)
    log_mu = torch.randn(1, 11, dtype=DOUBLE).log_softmax(-1)
    found = in_expectation(Objective(Sampled(K1(None)), importance_cap=1e9), x, log_mu)
    wanted = gradients(divergences("reverse_kl", x, None, x.logits).sum(), by=x.logits)[0]
    assert torch.allclose(found, wanted, atol=1e-12)


# ── rewards ────────────────────────────────────────────────────────────────────────────────────

CLIPPED = ClippedSurrogate(0.2, 0.3)
ALONE = Objective(Sampled(MetricsOnly()), surrogate=CLIPPED)
REWARD_ALONE = ForwardKLConfig(weight=0)


def rewards(x: Case, temperature: float = 1.0) -> torch.Tensor:
    """PPO's clipped surrogate of each token with the reward's weights, summed, by autograd."""
    r, a = x.ratio(temperature), x.tokens.advantages
    return (x.tokens.reward_weights * -torch.minimum(r * a, r.clamp(0.8, 1.3) * a)).sum()


@pytest.mark.parametrize("temperature", [1.0, 0.6])
@every_support
@every_kind
def test_reward_and_distillation_add_up(kind: str, tail: Tail | None, temperature: float) -> None:
    x, divergence = case(), DIVERGENCES[kind]
    wanted = rewards(x, temperature) + divergences(kind, x, tail, x.logits).sum()
    objective = Objective(term(divergence, tail), surrogate=CLIPPED, temperature=temperature)
    assert_same(loss_of(objective, x.on(tail)), wanted, by=x.logits)


@pytest.mark.parametrize(("student", "teacher"), [(11, 14), (14, 11)])
def test_the_reward_is_normalized_over_all_of_the_students_rows(student: int, teacher: int) -> None:
    torch.manual_seed(7)
    logits = torch.randn(6, student, dtype=DOUBLE, requires_grad=True)
    y = Case(logits, torch.randn(6, teacher, dtype=DOUBLE), case(v=11).tokens)
    common = replace(y, teacher=y.teacher[:, :11].log_softmax(-1))
    wanted = rewards(y) + divergences("jsd", common, None, logits[:, :11]).sum()
    loss = loss_of(Objective(OnVocabulary(jsd(0.3), None), surrogate=CLIPPED), y.states())
    ours, theirs = gradients(loss, wanted, by=logits)
    assert torch.allclose(ours, theirs, atol=1e-12)


def test_the_reward_alone_needs_no_distillation_and_a_clipped_token_has_no_gradient() -> None:
    x = case()
    loss, metrics = run(ALONE, x)
    assert_same(loss, rewards(x), by=x.logits)
    assert metrics["distillation"].abs().max() == 0
    r, a = x.ratio(), x.tokens.advantages
    assert metrics["clipped"].tolist() == (((r > 1.3) & (a > 0)) | ((r < 0.8) & (a < 0))).tolist()
    assert metrics["surrogate"].isfinite().all()


@pytest.mark.parametrize("low", [0.1, 0.9])
@given(st.floats(-80, 80), st.floats(-5, 5), st.floats(1.01, 10), st.floats(0.05, 2))
def test_the_dual_clip_is_the_formula_of_its_paper(
    low: float, gap: float, advantage: float, dual: float, high: float
) -> None:
    """max(min(rA, clip(r) A), cA) for A < 0; its slope by log r, and none where it is bounded."""
    log_ratio = torch.tensor([gap], dtype=DOUBLE, requires_grad=True)
    a = torch.tensor([advantage], dtype=DOUBLE)
    r = log_ratio.exp()
    expected = torch.minimum(r * a, r.clamp(1 - low, 1 + high) * a)
    if advantage < 0:
        expected = torch.maximum(expected, dual * a)
    found = ClippedSurrogate(low, high, dual)(log_ratio.detach(), a)
    assert torch.allclose(found.value, -expected.detach(), rtol=1e-12)
    distances = [abs(r.item() - edge) for edge in (1 - low, 1 + high, dual)]
    if min(distances) > 1e-9:
        (wanted,) = torch.autograd.grad(-expected.sum(), log_ratio)
        assert torch.allclose(found.slope, wanted, rtol=1e-12)


@pytest.mark.parametrize("gap", [5.0, 60.0, 1e3])
def test_a_stale_token_of_negative_advantage_has_a_bounded_loss(gap: float) -> None:
    x = case(n=2)
    x = x.having(
        rollout_logprobs=x.log_q().detach() - gap,
        advantages=torch.tensor([-2.0, 0.0]).double(),
        reward_weights=torch.ones(2).double(),
    )
    y = replace(x, logits=x.logits.detach().float().requires_grad_())
    loss, metrics = run(build_objective(REWARD_ALONE, RewardConfig()), y)
    assert metrics["surrogate"].tolist() == [6.0, 0.0]
    assert metrics["dual_clipped"].tolist() == [True, False]
    assert gradients(loss, by=y.logits)[0].abs().max() == 0
    free = run(build_objective(REWARD_ALONE, RewardConfig(dual_clip=None)), y)[1]
    assert free["surrogate"][0] > 100
    assert "dual_clipped" not in free


# ── from the config ────────────────────────────────────────────────────────────────────────────

CONFIGS: dict[str, tuple[Any, Any]] = {
    **{f"tail {t}": (ForwardKLConfig(tail=t), OnTopK(ForwardKL(), t, None)) for t in TAILS},
    "k1": (K1Config(kind="k1", importance="off"), Sampled(K1(None))),
    "k3": (
        SampledConfig(kind="k3", importance="off"),
        Sampled(SampledEstimator("k3", "supervised", None)),
    ),
    "k1, weighed": (K1Config(kind="k1"), Objective(Sampled(K1(None)), importance_cap=2.0)),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_the_config_names_the_objective(name: str) -> None:
    config, loss = CONFIGS[name]
    assert loss_of(build_objective(config), case()).item() == loss_of(loss, case()).item()


def test_importance_is_off_for_divergences_unless_asked_for() -> None:
    assert "truncated" not in run(build_objective(ForwardKLConfig()), case())[1]
    asked = ForwardKLConfig(importance="truncated")
    assert "truncated" in run(build_objective(asked), case())[1]


# ── the student's entropy over its whole vocabulary, whatever the objective looks at ───────────

OBJECTIVES: dict[str, Any] = {
    "topk": Objective(term(ForwardKL(), "bucket")),
    "full": Objective(term(ReverseKL(), None)),
    "jsd": Objective(term(jsd(0.3), None)),
    "sampled": Objective(Sampled(K1(None))),
}


def entropy_of(name: str, x: Case) -> torch.Tensor:
    full = isinstance(OBJECTIVES[name].term, OnVocabulary)
    return run(OBJECTIVES[name], x.on(None) if full else x)[1]["entropy"]


def exact(logits: torch.Tensor) -> torch.Tensor:
    return torch.distributions.Categorical(logits=logits.detach().double()).entropy()


@given(
    seed=st.integers(0, 99),
    v=st.integers(2, 17),
    k=st.integers(1, 17),
    name=st.sampled_from(sorted(OBJECTIVES)),
    scale=st.floats(0, 30),
)
def test_it_is_that_of_float64(seed: int, v: int, k: int, name: str, scale: float) -> None:
    x = case(seed, v=v, k=min(k, v))
    logits = (x.logits.detach() * scale).requires_grad_()
    found = entropy_of(name, Case(logits, x.teacher, x.tokens))
    assert torch.allclose(found, exact(logits), atol=1e-10)


@pytest.mark.parametrize("name", OBJECTIVES)
def test_a_uniform_student_has_the_most_and_a_sure_one_none(name: str) -> None:
    x = case()
    logits = torch.zeros(6, 11, dtype=DOUBLE, requires_grad=True)
    found = entropy_of(name, Case(logits, x.teacher, x.tokens))
    assert torch.allclose(found, torch.full((6,), math.log(11)).double())
    logits = torch.zeros(6, 11)
    logits[:, 2] = 1e4
    found = entropy_of(name, Case(logits.requires_grad_(), x.teacher, x.tokens))
    assert found.tolist() == [0.0] * 6


@pytest.mark.parametrize(("student", "teacher"), [(11, 14), (14, 11)])
def test_the_padding_of_the_students_vocabulary_counts(student: int, teacher: int) -> None:
    torch.manual_seed(3)
    logits = torch.randn(6, student, dtype=DOUBLE, requires_grad=True)
    x = Case(logits, torch.randn(6, teacher, dtype=DOUBLE), case(v=11).tokens)
    assert torch.allclose(entropy_of("full", x), exact(logits), atol=1e-12)
