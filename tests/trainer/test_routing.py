"""Routing replay: the routers take given experts, and weigh them by themselves."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from async_opd.config.sections.train import TrainConfig
from async_opd.core.errors import LengthError, StageError
from async_opd.core.samples import Sample
from async_opd.weight_sync.layout import experts_apart
from tests.trainer.models import new_rank, random_sample, tiny_model
from tests.trainer.test_mixtures import mixture
from trainer.batches.packing import pack
from trainer.layers import recompute_activations
from trainer.learner import Learner
from trainer.student.routing import Replay, replay_routing

SIZES, LAYERS, TOP_K = (5, 3, 7), 2, 2


def chosen(model: Any, sample: Sample) -> np.ndarray:
    """The experts that an engine with the model's weights would return: [T - 1, layers, k]."""
    found: dict[int, torch.Tensor] = {}
    handles = [
        layer.mlp.gate.register_forward_hook(lambda _, __, out, at=at: found.update({at: out[2]}))
        for at, layer in enumerate(model.model.layers)
        if hasattr(layer.mlp, "gate")
    ]
    with torch.no_grad():
        model(torch.from_numpy(sample.rollout.token_ids).long()[None])
    for handle in handles:
        handle.remove()
    experts = np.zeros((sample.rollout.tokens - 1, LAYERS, TOP_K), np.uint8)
    for at, one in found.items():
        experts[:, at] = one[:-1].numpy()
    return experts


def samples(model: Any, other: bool = False) -> list[Sample]:
    """Samples with the experts that the model chooses, or with ``other`` ones."""
    made = []
    for index, size in enumerate(SIZES):
        sample = random_sample(index, size, k=6)
        experts = chosen(model, sample)
        experts = (experts + 1) % 3 if other else experts
        made.append(replace(sample, rollout=replace(sample.rollout, routed_experts=experts)))
    return made


def learner(model: Any, routing: Any) -> Learner:
    train = TrainConfig(lr=1e-2, warmup_steps=0, routing=routing, tokens_per_micro_batch=16)
    return Learner(new_rank(model, train))


def step(model: Any, batch: list[Sample], routing: str = "replay") -> dict[str, torch.Tensor]:
    made = learner(model, routing)
    made.train_batch(batch)
    return dict(experts_apart(made.named_weights()))


def test_the_models_own_experts_change_nothing() -> None:
    batch = samples(mixture())
    own, replayed = step(mixture(), batch, "own"), step(mixture(), batch)
    assert all(torch.equal(own[name], replayed[name]) for name in own)


def test_other_experts_are_taken_and_trained() -> None:
    model = mixture()
    taken = chosen_in_training(model, samples(model, other=True))
    assert torch.equal(taken[0][taken[1] >= 0], taken[1][taken[1] >= 0])
    own, replayed = (step(mixture(), samples(mixture(), other)) for other in (False, True))
    part = "model.layers.1.mlp.experts.0.up_proj.weight"
    assert not torch.allclose(own[part], replayed[part], atol=1e-4)


def chosen_in_training(model: Any, batch: list[Sample]) -> tuple[torch.Tensor, torch.Tensor]:
    """The experts that the second layer's router returned for a row, and those given to it."""
    found: list[torch.Tensor] = []
    rank = learner(model, "replay")._rank
    model.model.layers[1].mlp.gate.register_forward_hook(lambda _, __, out: found.append(out[2]))
    packed = pack(batch)
    rank.student.loss(packed)
    return found[0], packed.experts[:, 1]


def test_recomputed_activations_have_the_same_experts() -> None:
    batch = samples(mixture(), other=True)
    kept, recomputed = mixture(), mixture()
    recompute_activations(recomputed)
    one, two = step(kept, batch), step(recomputed, batch)
    assert all(torch.allclose(one[name], two[name], atol=1e-6) for name in one)


def test_the_last_token_of_a_sample_has_the_routers_own() -> None:
    packed = pack(samples(mixture()))
    last = packed.starts[1:].long() - 1
    assert (packed.experts[last] == -1).all()
    assert (packed.experts >= 0).sum() == (len(packed.experts) - len(SIZES)) * LAYERS * TOP_K


def test_samples_without_experts_and_students_without_routers_are_refused() -> None:
    batch = samples(mixture())
    batch[1] = replace(batch[1], rollout=replace(batch[1].rollout, routed_experts=None))
    with pytest.raises(StageError, match="no experts of the engine"):
        learner(mixture(), "replay").train_batch(batch)
    with pytest.raises(StageError, match="no router of a kind that can replay"):
        replay_routing(tiny_model())


def test_supervised_rows_have_the_routers_own_experts_and_other_lengths_are_refused() -> None:
    own = Replay()
    own.take(pack([random_sample(0, 4, k=6)]), supervised=True)
    assert own.experts is None
    rollout = random_sample(0, 4).rollout
    with pytest.raises(LengthError, match="experts"):
        replace(rollout, routed_experts=np.zeros((rollout.tokens, 1, 1), np.uint8))


def test_a_checkpoint_keeps_the_experts(tmp_path: Any) -> None:
    from trainer.saving.sample_file import read_samples, write_samples

    batch = samples(mixture())
    write_samples(tmp_path / "samples", batch)
    for one, other in zip(batch, read_samples(tmp_path / "samples"), strict=True):
        assert np.array_equal(one.rollout.routed_experts, other.rollout.routed_experts)
