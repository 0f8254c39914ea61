"""Supervised steps: the cross entropy of given tokens, beside the run's own objective."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from async_opd.core.errors import StageError
from async_opd.core.samples import Sample
from async_opd.data.answers import supervised
from tests.trainer.models import kept_gradients, random_sample, tiny_model
from tests.trainer.test_learner import rank_of
from trainer.learner import Learner
from trainer.losses.estimators import CrossEntropy

RATE = 1e-2


def samples() -> list[Sample]:
    return [supervised(random_sample(i, size).rollout) for i, size in enumerate([5, 1, 9])]


def learner(kind: str = "forward_kl", **train: Any) -> Learner:
    return Learner(rank_of(kind, lr=RATE, **train))


def cross_entropy(model: Any, batch: list[Sample]) -> float:
    """The mean of -log q over the batch's response tokens, in float64, one sample at a time."""
    double = model.double()
    losses = []
    for sample in batch:
        ids = torch.from_numpy(sample.rollout.token_ids.astype(np.int64))[None]
        log_q = double(ids).logits[0].log_softmax(-1)
        first = len(sample.rollout.prompt.token_ids)
        answer = ids[0, first:]
        losses.append(-log_q[first - 1 : -1].gather(-1, answer[:, None])[:, 0])
    return float(torch.cat(losses).mean().detach())


def test_the_slope_is_minus_one_and_supervised_steps_are_none_of_the_runs() -> None:
    log_q = torch.tensor([-0.5, -3.0])
    slopes = CrossEntropy()(torch.zeros(2), log_q, torch.log(-torch.expm1(log_q)))
    assert (slopes.value.tolist(), slopes.slope.tolist()) == ([0.5, 3.0], [-1.0, -1.0])
    made = learner(warmup_steps=10)
    made.supervise(samples(), RATE)
    report = made.train_batch([random_sample(0, 4, k=6)])
    assert report.metrics["train/lr"] == pytest.approx(RATE / 10)


@pytest.mark.parametrize("kind", ["forward_kl", "k1"])
def test_the_loss_is_the_mean_cross_entropy_whatever_the_runs_objective(kind: str) -> None:
    made = learner(kind)
    wanted = cross_entropy(tiny_model(), samples())
    assert made.supervise(samples(), RATE)["loss"] == pytest.approx(wanted, rel=1e-5)


def test_the_gradient_is_that_of_the_mean_cross_entropy() -> None:
    rank = rank_of(max_grad_norm=1e6)
    kept = kept_gradients(rank)
    Learner(rank).supervise(samples(), RATE)
    model = tiny_model().double()
    total = 0.0
    tokens = sum(len(sample.rollout.response_ids) for sample in samples())
    for sample in samples():
        ids = torch.from_numpy(sample.rollout.token_ids.astype(np.int64))[None]
        first = len(sample.rollout.prompt.token_ids)
        logits = model(ids).logits[0, first - 1 : -1]
        total = total + torch.nn.functional.cross_entropy(logits, ids[0, first:], reduction="sum")
    (total / tokens).backward()
    for name, parameter in model.named_parameters():
        assert torch.allclose(kept[name].double(), parameter.grad, atol=1e-6), name


def test_after_the_moments_are_forgotten_a_step_is_that_of_a_new_optimizer() -> None:
    made, fresh = learner(), learner()
    made.supervise(samples(), RATE)
    made.forget_moments()
    fresh.model.load_state_dict(made.model.state_dict())
    batch = [random_sample(0, 4, k=6)]
    made.train_batch(batch)
    fresh.train_batch(batch)
    for a, b in zip(made.model.parameters(), fresh.model.parameters(), strict=True):
        assert torch.equal(a, b)


def test_a_loss_that_is_not_finite_ends_the_cold_start_and_changes_no_weight() -> None:
    rank = rank_of()
    weight = next(iter(rank.model.parameters()))
    with torch.no_grad():
        weight.fill_(torch.nan)
    with pytest.raises(StageError, match=r"lower cold_start\.lr"):
        Learner(rank).supervise(samples(), RATE)
    assert not rank.optimizer.state
