"""Mixtures of experts in transformers' own form: one rank and several train them alike."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from async_opd.config.sections.train import TrainConfig
from async_opd.weight_sync.layout import experts_apart
from tests.trainer.families import made
from tests.trainer.models import new_rank, random_sample
from tests.trainer.ranks import mesh_of, on_ranks
from trainer.learner import Learner
from trainer.rank import Rank
from trainer.rank_group import RankSpec
from trainer.student.check import check_placed, check_student

BATCH = [random_sample(i, size, k=6) for i, size in enumerate([5, 1, 9, 3, 0, 7, 2])]


def mixture(**settings: Any) -> Any:
    """A Qwen3-MoE with a dense layer and one of three experts, which ranks divide unequally."""
    sizes = {"moe_intermediate_size": 24, "num_experts": 3, "num_experts_per_tok": 2}
    return made(
        "Qwen3Moe", head_dim=16, mlp_only_layers=[0], norm_topk_prob=True, **sizes, **settings
    )


def rank_of(spec: RankSpec | None, tokens: int = 16, **settings: Any) -> Rank:
    train = TrainConfig(lr=1e-2, warmup_steps=0, tokens_per_micro_batch=tokens, dtype="float32")
    rank = new_rank(mixture(**settings), train, mesh=mesh_of(spec))
    if spec is not None:
        check_placed(rank.student, check_student(mixture()))
    return rank


def found_by(learner: Learner) -> dict[str, Any]:
    """Metrics of two steps, and the weights that engines get after them."""
    metrics = [learner.train_batch(BATCH).metrics for _ in range(2)]
    return {"metrics": metrics, "weights": dict(experts_apart(learner.named_weights()))}


@pytest.fixture(scope="module")
def alone() -> dict[str, Any]:
    return found_by(Learner(rank_of(None)))


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 4])
def test_several_ranks_train_a_mixture_as_one_does(ranks: int, alone: dict[str, Any]) -> None:
    found = on_ranks(ranks, rank_of, found_by)
    for several, one in zip(found["metrics"], alone["metrics"], strict=True):
        assert several["loss/total"] == pytest.approx(one["loss/total"], rel=1e-4)
        assert several["train/grad_norm"] == pytest.approx(one["train/grad_norm"], rel=1e-4)
    assert found["weights"].keys() == alone["weights"].keys()
    for name, weight in alone["weights"].items():
        assert torch.allclose(found["weights"][name], weight, atol=1e-5), name


def test_a_step_changes_experts_and_routers(alone: dict[str, Any]) -> None:
    before = dict(experts_apart(Learner(rank_of(None)).named_weights()))
    part = "model.layers.1.mlp"
    names = [f"{part}.experts.{i}.{m}_proj" for i in range(3) for m in ("gate", "up", "down")]
    for name in [f"{part}.gate", *names]:
        assert not torch.equal(alone["weights"][f"{name}.weight"], before[f"{name}.weight"]), name


def test_the_routers_balance_is_no_part_of_the_loss(alone: dict[str, Any]) -> None:
    """Even of a model whose config asks for it: the objective is distillation, and no other."""
    asking = {"output_router_logits": True, "router_aux_loss_coef": 10.0}
    found = found_by(Learner(rank_of(None, **asking)))
    assert found["metrics"][0]["loss/total"] == alone["metrics"][0]["loss/total"]
    for name, weight in alone["weights"].items():
        assert torch.equal(found["weights"][name], weight), name
