"""A floor for the teacher's log-probabilities: finite losses, and the student's gradient whole."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from tests.trainer.oracle import (
    DIVERGENCES,
    ESTIMATES,
    Case,
    Tail,
    assert_same,
    case,
    config_of,
    gradients,
    loss_of,
    outcomes,
    run,
)
from trainer.losses import build_objective

TAILS: list[Tail | None] = ["bucket", "ignore", None]


def config(kind: str, floor: float | None, **values: Any) -> Any:
    return config_of(kind, teacher_floor=floor, **values)


def reverse(tail: Tail | None, floor: float | None) -> Any:
    """The product's reverse KL over the teacher's top-k, or the vocabulary for None."""
    support = {"support": "full_vocab"} if tail is None else {"tail": tail}
    return build_objective(config("reverse_kl", floor, **support))


def excluding(seed: int = 0) -> Case:
    """A teacher that excludes a token of each support and the sampled one; top-k of the student."""
    x = case(seed, of="student")
    ids, targets = x.tokens.teacher_ids, x.tokens.targets[:, None]
    teacher = x.teacher.scatter(-1, ids[:, :1], -torch.inf)
    teacher = teacher.scatter(-1, targets, -torch.inf).log_softmax(-1)
    return replace(x, teacher=teacher).having(
        teacher_topk_logprobs=teacher.gather(-1, ids),
        teacher_rest_logprobs=teacher.scatter(-1, ids, -torch.inf).logsumexp(-1),
        teacher_logprobs=teacher.gather(-1, targets)[:, 0],
    )


def exact(x: Case, tail: Tail | None, floor: float) -> torch.Tensor:
    """Σ q (log q - max(log p, floor)), by autograd."""
    log_p, log_q = outcomes(x, tail, x.logits)
    return (log_q.exp() * (log_q - log_p.clamp_min(floor))).sum(-1)


@pytest.mark.parametrize("floor", [-1.0, -10.0, -40.0])
@pytest.mark.parametrize("tail", TAILS)
def test_reverse_kl_of_an_excluded_token_is_finite(tail: Tail | None, floor: float) -> None:
    x = excluding()
    expected = exact(x, tail, floor).sum()
    loss = loss_of(reverse(tail, floor), x.on(tail))
    assert torch.isfinite(gradients(loss, by=x.logits)[0]).all()
    assert_same(loss, expected, by=x.logits, atol=1e-11)


@pytest.mark.parametrize("tail", TAILS)
def test_a_floored_reverse_kl_has_the_numerical_gradient(tail: Tail | None) -> None:
    x = excluding(seed=3)
    y = x.on(tail)
    assert torch.autograd.gradcheck(lambda z: loss_of(reverse(tail, -5.0), y, z), (x.logits,))


@given(st.integers(0, 99), st.sampled_from(TAILS))
def test_a_floor_below_everything_changes_no_bit(seed: int, tail: Tail | None) -> None:
    x = case(seed)
    y = x.on(tail)
    losses = [loss_of(reverse(tail, floor), y) for floor in (None, -1e4)]
    assert losses[0].item() == losses[1].item()
    assert torch.equal(*gradients(*losses, by=x.logits))


def test_a_student_far_below_the_floor_keeps_its_gradient() -> None:
    """Clamping log q as well would leave its probability of 2e-9 no pull at all."""
    x = excluding()
    logits = x.logits.detach().clone()
    logits[:, 3] = -20.0
    y = replace(x, logits=logits.requires_grad_())
    (ours,) = gradients(loss_of(reverse(None, -10.0), y.states()), by=logits)
    (theirs,) = gradients(exact(y, None, -10.0).sum(), by=logits)
    assert (ours[:, 3] != 0).all()
    assert torch.allclose(ours[:, 3], theirs[:, 3], rtol=1e-9, atol=0)


def test_a_floored_rest_is_the_floor_too() -> None:
    x = case().having(teacher_rest_logprobs=torch.full((6,), -torch.inf))
    assert loss_of(reverse("bucket", None), x).item() == math.inf
    assert math.isfinite(loss_of(reverse("bucket", -10.0), x).item())


@pytest.mark.parametrize("kind", ESTIMATES)
def test_an_estimate_of_a_token_that_the_teacher_excludes_is_finite_with_a_floor(kind: str) -> None:
    x = excluding()
    floored = x.having(teacher_logprobs=torch.full((6,), -8.0).double())
    loss, metrics = run(build_objective(config(kind, -8.0)), x)
    expected = loss_of(build_objective(config(kind, None)), floored)
    assert loss.item() == expected.item()
    assert all(value.isfinite().all() for value in metrics.values())
    assert torch.equal(*gradients(loss, expected, by=x.logits))


def test_jsd_with_beta_one_and_the_reverse_part_of_mixed_kl_take_the_floor() -> None:
    x = excluding()
    loss = loss_of(build_objective(config("jsd", -10.0, beta=1)), x)
    assert loss.item() == loss_of(reverse("bucket", -10.0), x).item()
    mixed = loss_of(build_objective(config("mixed_kl", -10.0, forward_weight=0.25)), x)
    forward = loss_of(build_objective(config("forward_kl", None)), x)
    expected = 0.25 * forward + 0.75 * loss_of(reverse("bucket", -10.0), x)
    assert mixed.item() == pytest.approx(expected.item(), rel=1e-12)


NEEDS_NONE = [
    {"kind": "forward_kl"},
    {"kind": "jsd", "beta": 0.5},
    {"kind": "mixed_kl", "forward_weight": 1},
]


@pytest.mark.parametrize("values", NEEDS_NONE)
def test_a_floor_is_refused_where_the_loss_is_finite_without_one(values: dict[str, Any]) -> None:
    """And one above certainty everywhere."""
    with pytest.raises(ValidationError, match="needs no teacher_floor"):
        config(floor=-10.0, **values)
    with pytest.raises(ValidationError, match="less than 0"):
        config("reverse_kl", 0.0)


@pytest.mark.parametrize("kind", DIVERGENCES)
def test_every_divergence_refuses_a_floor_or_has_it_in_its_loss(kind: str) -> None:
    config(kind, None)
    try:
        floored = config(kind, -10.0)
    except ValidationError:
        return
    x = excluding()
    bounded, plain = (loss_of(build_objective(one), x) for one in (floored, config(kind, None)))
    assert bounded.item() != plain.item()
