"""A rank that is offloaded between two steps trains on as one that is not, bit for bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from async_opd.config.sections.train import TrainConfig
from tests.trainer.models import new_rank, samples_of, tiny_model
from tests.trainer.states import state_of
from trainer.learner import Learner
from trainer.rank import Rank

TRAIN = TrainConfig(lr=1e-2, tokens_per_micro_batch=16)
BATCHES = [samples_of(5, 5, 5, first=10 * step) for step in range(3)]


def learner(rank: Rank | None = None) -> Learner:
    return Learner(rank or new_rank(tiny_model(), TRAIN))


def weights(made: Learner) -> dict[str, torch.Tensor]:
    return dict(made.named_weights())


def memory(rank: Any) -> dict[int, torch.UntypedStorage]:
    """The memory of weights and optimizer by address; it stays allocated while it is held here."""
    states = [t for state in rank.optimizer.state.values() for t in state.values() if t.ndim]
    return {t.data_ptr(): t.untyped_storage() for t in (*rank.model.parameters(), *states)}


@pytest.fixture(scope="module")
def expected() -> dict[str, torch.Tensor]:
    made = learner()
    for batch in BATCHES:
        made.train_batch(batch)
    return weights(made)


def test_steps_around_an_offload_equal_steps_without(expected: dict[str, torch.Tensor]) -> None:
    made = learner()
    for batch in BATCHES:
        made.offload()
        made.onload()
        made.train_batch(batch)
    found = weights(made)
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_no_weight_and_no_moment_stays_where_it_was() -> None:
    rank = new_rank(tiny_model(), TRAIN)
    made = learner(rank)
    made.train_batch(BATCHES[0])
    before = memory(rank)
    made.offload()
    assert not before.keys() & memory(rank).keys()


def test_a_tied_head_stays_tied_and_the_state_of_an_offloaded_rank_is_its_state() -> None:
    made = learner()
    made.offload()
    made.onload()
    model: Any = made.model
    assert model.lm_head.weight is model.get_input_embeddings().weight
    made.train_batch(BATCHES[0])
    expected = state_of(made)
    made.offload()
    found = state_of(made)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
