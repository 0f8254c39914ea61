"""Any split into micro-batches, in any order, gives the same gradient."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from async_opd.config.sections.train import TrainConfig
from async_opd.core.samples import Sample
from tests.trainer.models import kept_gradients, random_sample, tiny_model
from tests.trainer.oracle import config_of
from trainer.learner import Learner
from trainer.losses import build_objective
from trainer.rank import Rank

BATCH = [random_sample(index, size, k=6) for index, size in enumerate([5, 1, 0, 9, 3])]
Gradients = dict[str, torch.Tensor]
cache: dict[tuple[str, torch.dtype], Gradients] = {}


def gradients(batch: list[Sample], kind: str, dtype: torch.dtype, budget: int) -> Gradients:
    """The gradients an optimizer step would have used, before clipping bites."""
    train = TrainConfig(tokens_per_micro_batch=budget, max_grad_norm=1e9)
    objective = build_objective(config_of(kind))
    rank = Rank(tiny_model().to(dtype), objective, train, torch.device("cpu"))
    kept = kept_gradients(rank)
    Learner(rank).train_batch(batch)
    return kept


def whole(kind: str, dtype: torch.dtype) -> Gradients:
    if (kind, dtype) not in cache:
        cache[kind, dtype] = gradients(BATCH, kind, dtype, 10**6)
    return cache[kind, dtype]


@pytest.mark.parametrize("kind", ["forward_kl", "k1"])
@pytest.mark.parametrize(("dtype", "atol"), [(torch.float64, 1e-10), (torch.float32, 1e-5)])
@settings(max_examples=6, deadline=None)
@given(budget=st.integers(1, 40), order=st.permutations(range(len(BATCH))))
def test_any_split_in_any_order_gives_the_same_gradient(
    kind: str, dtype: torch.dtype, atol: float, budget: int, order: list[int]
) -> None:
    split = gradients([BATCH[index] for index in order], kind, dtype, budget)
    expected = whole(kind, dtype)
    assert all(torch.allclose(expected[name], split[name], atol=atol) for name in expected)
