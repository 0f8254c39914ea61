"""The learner: independence of the split, steps that help, steps that are refused."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import TypeAdapter

from async_opd.core.config import Loss, TrainConfig
from async_opd.core.errors import StageError
from async_opd.core.samples import Sample
from tests.trainer.models import random_sample, tiny_model
from trainer import learner as learner_module
from trainer.learner import Learner
from trainer.losses import build_loss

SIZES = [5, 1, 0, 9, 3, 7]


def samples(k: int = 6) -> list[Sample]:
    return [random_sample(index, size, k=k) for index, size in enumerate(SIZES)]


def learner(seed: int = 0, kind: str = "forward_kl", **train: Any) -> Learner:
    config = TrainConfig.model_validate({"lr": 1e-3, "warmup_steps": 0, "steps": 50, **train})
    loss: Any = TypeAdapter(Loss).validate_python({"kind": kind})
    return Learner(tiny_model(seed), build_loss(loss), config, torch.device("cpu"))


def gradients(batch: list[Sample], kind: str, budget: int) -> dict[str, torch.Tensor]:
    made = learner(kind=kind, tokens_per_micro_batch=budget)
    made._optimizer.step = lambda: None  # type: ignore[method-assign]
    kept: dict[str, torch.Tensor] = {}

    def keep(**_: Any) -> None:
        kept.update({n: p.grad.clone() for n, p in made.model.named_parameters()})

    made._optimizer.zero_grad = keep  # type: ignore[method-assign]
    made.train_batch(batch)
    return kept


@pytest.mark.parametrize("kind", ["forward_kl", "reverse_kl", "jsd", "k1", "k2", "k3", "abs"])
@pytest.mark.parametrize("budget", [1, 12, 20])
def test_the_gradient_does_not_depend_on_the_split_into_micro_batches(
    kind: str, budget: int
) -> None:
    batch = samples(k=6)
    whole, split = gradients(batch, kind, 10**6), gradients(batch, kind, budget)
    assert all(torch.allclose(whole[name], split[name], atol=1e-6) for name in whole)


def test_the_gradient_does_not_depend_on_the_order_of_the_samples() -> None:
    forward = gradients(samples(), "forward_kl", 20)
    backward = gradients(samples()[::-1], "forward_kl", 20)
    assert all(torch.allclose(forward[name], backward[name], atol=1e-6) for name in forward)


def test_the_gradient_does_not_depend_on_the_chunks_of_logits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    whole = gradients(samples(), "forward_kl", 10**6)
    monkeypatch.setattr(learner_module, "CHUNK_ROWS", 2)
    chunked = gradients(samples(), "forward_kl", 10**6)
    assert all(torch.allclose(whole[name], chunked[name], atol=1e-6) for name in whole)


def test_the_loss_is_a_mean_over_response_tokens() -> None:
    batch = samples()
    one = learner().train_batch(batch).metrics["loss/total"]
    two = learner().train_batch([*batch, *batch]).metrics["loss/total"]
    assert one == pytest.approx(two, rel=1e-5)


def test_forward_kl_falls() -> None:
    made = learner(lr=1e-2)
    losses = [made.train_batch(samples()).metrics["loss/total"] for _ in range(20)]
    assert losses[-1] < 0.5 * losses[0]


def test_the_policy_gradient_lowers_the_sampled_gap_to_the_teacher() -> None:
    """On fixed tokens that the teacher finds more likely than the student does."""
    made = learner(kind="k1", lr=1e-2)
    batch = [sample for sample in samples(k=0) if len(sample.rollout.response_ids)]
    gaps = [abs(made.train_batch(batch).metrics["loss/k1"]) for _ in range(20)]
    assert gaps[-1] < gaps[0]


def test_two_equal_runs_give_equal_weights() -> None:
    first, second = learner(), learner()
    for _ in range(3):
        first.train_batch(samples())
        second.train_batch(samples())
    for a, b in zip(first.model.parameters(), second.model.parameters(), strict=True):
        assert torch.equal(a, b)


def test_a_batch_of_empty_responses_changes_nothing() -> None:
    made = learner()
    before = [parameter.clone() for parameter in made.model.parameters()]
    report = made.train_batch([random_sample(0, 0, k=6), random_sample(1, 0, k=6)])
    assert report.metrics["train/response_tokens"] == 0
    for a, b in zip(before, made.model.parameters(), strict=True):
        assert torch.equal(a, b)


def poisoned() -> list[Sample]:
    batch = samples()
    batch[0].scores.logprobs[0, 0] = np.nan
    return batch


def test_a_loss_that_is_not_finite_stops_with_the_uids() -> None:
    with pytest.raises(StageError, match="p0/0"):
        learner().train_batch(poisoned())


def test_a_loss_that_is_not_finite_leaves_the_weights_alone() -> None:
    made = learner()
    with pytest.raises(StageError):
        made.train_batch(poisoned())
    assert all(bool(p.isfinite().all()) for p in made.model.parameters())


def test_rollout_gap_is_the_mean_distance_to_the_rollout_logprobs() -> None:
    batch = [random_sample(0, 4, k=6)]
    made = learner()
    rollout = batch[0].rollout
    ids = torch.tensor([[*rollout.prompt.token_ids.tolist(), *rollout.response_ids.tolist()]])
    with torch.no_grad():
        table = made.model(ids).logits[0, 2:-1].log_softmax(-1)
    own = table[torch.arange(4), torch.from_numpy(rollout.response_ids).long()].numpy()
    expected = float(np.abs(own - rollout.rollout_logprobs).mean())
    gap = made.train_batch(batch).metrics["loss/rollout_gap"]
    assert gap == pytest.approx(expected, rel=1e-5)


def test_gradients_are_clipped_to_the_norm() -> None:
    made = learner(max_grad_norm=1e-9, weight_decay=0.0)
    assert math.isfinite(made.train_batch(samples()).metrics["train/grad_norm"])


def test_published_weights_have_the_names_of_the_checkpoint(tmp_path: Any) -> None:
    from safetensors import safe_open

    made = learner()
    made.model.save_pretrained(tmp_path)
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        assert sorted(file.keys()) == sorted(name for name, _ in made.named_weights())
