"""Four ranks in two dimensions: losses and gradients of every objective are those of one rank."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from async_opd.config.sections.loss import RewardConfig, score_kind
from async_opd.config.sections.train import TrainConfig
from async_opd.core.samples import Sample
from async_opd.core.scores import HiddenStates
from benchmarks.local_ranks import in_processes
from tests.trainer.models import kept_gradients, random_sample, tiny_model
from tests.trainer.oracle import config_of, every_loss
from trainer.batches.token_weights import TokenWeighting
from trainer.follower import Follower
from trainer.layers import recompute_activations
from trainer.learner import Learner
from trainer.losses import build_objective
from trainer.losses.teacher_heads import TeacherHead
from trainer.rank import Rank
from trainer.rank_group import SINGLE_RANK, RankGroup, RankSpec
from trainer.student.placed import PlacedStudent
from trainer.student.sharding import join_mesh

pytestmark = pytest.mark.slow

CPU = torch.device("cpu")
RANKS = 4
LAYOUTS = {
    "context × shard": {"context_parallel": 2},
    "replicate × shard": {"replicate": 2},
    "replicate × context": {"replicate": 2, "context_parallel": 2},
}
VARIED: dict[str, dict[str, Any]] = {
    "k1": {"clamp": 0.5},
    "k2": {"gradient": "policy_gradient"},
    "k3": {"teacher_floor": -3, "importance": "off"},
    "abs": {"reduction": "seq_mean_token_mean"},
    "reverse_kl": {"tail": "ignore", "reduction": "seq_mean_token_sum"},
    "jsd": {"tail": "renormalize", "clamp": 0.1},
    "binary_kl": {"importance": "off"},
}
OBJECTIVES: dict[str, dict[str, Any]] = {
    **{kind: {"kind": kind, **VARIED.get(kind, {})} for kind in every_loss()},
    "responses weighed": {"kind": "forward_kl", "importance": "sequence", "importance_cap": 5},
    "truncated masked": {
        "kind": "reverse_kl",
        "mask_truncated": True,
        "reduction": "seq_mean_token_sum_norm",
    },
    **{
        f"{kind} full vocabulary": {"kind": kind, "support": "full_vocab"}
        for kind in ("forward_kl", "reverse_kl")
    },
    "full vocabulary, responses weighed": {
        "kind": "forward_kl",
        "support": "full_vocab",
        "importance": "sequence",
    },
    **{key: {"kind": "forward_kl"} for key in ("supervised", "recomputed", "recomputed in part")},
    "reward": {"kind": "k2", "weight": 0},
    "reward beside full vocabulary": {"kind": "jsd", "support": "full_vocab"},
}
SIZES = [(3, 29), (2, 1), (3, 5), (4, 3), (1, 0), (3, 8), (2, 2), (5, 6)]
"""Prompts and responses: one longer than a row, short ones, one empty."""
TEACHERS = {"wide": 3.0, "narrow": 0.5}
TRAIN = {"tokens_per_micro_batch": 24, "max_grad_norm": 0.05, "warmup_steps": 0, "lr": 1e-3}
OVERLAPS = {f"{owner}/topk_overlap" for owner in ("loss", *(f"teacher/{t}" for t in TEACHERS))}
"""They are measured on a sample of rows, every 16th of a tile."""
TIMES = {"compute_s", "train/micro_batches", "train/compute_s", "train/tflops"}
OF_THE_DIVISION = TIMES | OVERLAPS
RECOMPUTED: dict[str, Any] = {"recomputed": "full", "recomputed in part": "selective"}
Seen = tuple[dict[str, float], dict[str, torch.Tensor]]
"""Metrics of a step, and its gradients after clipping."""


def samples(kind: str) -> list[Sample]:
    """Two of each prompt, with rewards, of two teachers; one is cut off."""
    made = []
    for index, (prompt, size) in enumerate(SIZES):
        sample = random_sample(index, size, 0 if kind == "sampled" else 6, prompt)
        teacher = list(TEACHERS)[index // 2 % 2]
        asked = replace(sample.rollout.prompt, uid=f"p{index // 2}", teacher=teacher)
        rollout = replace(
            sample.rollout,
            prompt=asked,
            uid=f"p{index // 2}/{index % 2}",
            reward=float(index % 3),
            finish_reason="length" if index == 5 else "stop",
        )
        sample = replace(sample, rollout=rollout)
        if kind == "hidden":
            torch.manual_seed(index)
            states = torch.randn(size, 8 if teacher == "wide" else 4)
            sample = replace(sample, scores=HiddenStates(states.numpy(), "float32"))
        made.append(sample)
    return made


def heads() -> dict[str, TeacherHead]:
    torch.manual_seed(5)
    return {
        "wide": TeacherHead("wide", torch.randn(32, 8)),
        "narrow": TeacherHead("narrow", torch.randn(30, 4), temperature=1.3),
    }


def rank_of(name: str, layout: dict[str, int], mesh: Any = None) -> Any:
    """A rank in float64; ``gradients`` are those of its step."""
    loss = config_of(**OBJECTIVES[name])
    reward = RewardConfig() if name.startswith("reward") else None
    train = TrainConfig.model_validate({**TRAIN, **layout, "ranks": 1 if mesh is None else RANKS})
    objective = build_objective(loss, reward, 1.25 if "weighed" in name else 1.0)
    needed = heads() if score_kind(loss) == "hidden" else {}
    model = tiny_model().double()
    if name in RECOMPUTED:
        recompute_activations(model, RECOMPUTED[name])
    rank: Any = Rank(PlacedStudent(model, objective, train, CPU, needed, mesh))
    rank.gradients = kept_gradients(rank)
    return rank


def step(name: str, rank: Any, rank_group: RankGroup) -> Seen:
    loss = config_of(**OBJECTIVES[name])
    reward = RewardConfig() if name.startswith("reward") else None
    learner = Learner(rank, TokenWeighting.of(loss, reward, 40, TEACHERS), rank_group)
    if name == "supervised":
        metrics = learner.supervise(samples("sampled"), 1e-3)
    else:
        metrics = learner.train_batch(samples(score_kind(loss))).metrics
    return metrics, rank.gradients


class Restarted(Follower):
    """A follower that gets a new rank for each objective."""

    def __init__(self, layout: dict[str, int], mesh: Any) -> None:
        self._layout, self._mesh = layout, mesh

    async def begin(self, name: str) -> None:
        super().__init__(rank_of(name, self._layout, self._mesh))


@pytest.fixture(scope="module", params=LAYOUTS)
def found(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """What four ranks found, by objective; started once for all of them."""
    layout = LAYOUTS[request.param]
    file: Path = tmp_path_factory.mktemp("meshes") / "found.pt"

    def mesh_of(spec: RankSpec) -> Any:
        return join_mesh(spec, CPU, layout.get("replicate", 1))

    def lead(spec: RankSpec | None, rank_group: RankGroup) -> None:
        assert spec is not None
        mesh = mesh_of(spec)
        found = {}
        for name in OBJECTIVES:
            begun = rank_group.dispatch("begin", [(name,)] * (RANKS - 1))
            rank = rank_of(name, layout, mesh)
            begun()
            found[name] = step(name, rank, rank_group)
        torch.save(found, file)

    in_processes(RANKS, lead, lambda spec: Restarted(layout, mesh_of(spec)), 300)
    return torch.load(file, weights_only=True)


@pytest.fixture(scope="module")
def alone() -> dict[str, Seen]:
    return {name: step(name, rank_of(name, {}), SINGLE_RANK) for name in OBJECTIVES}


@pytest.mark.parametrize("name", OBJECTIVES)
def test_gradients_of_one_rank(found: dict[str, Seen], alone: dict[str, Seen], name: str) -> None:
    (_, seen), (_, expected) = found[name], alone[name]
    assert seen.keys() == expected.keys()
    for key, gradient in expected.items():
        assert torch.allclose(seen[key], gradient, rtol=1e-5, atol=1e-8), key
    assert any(float(gradient.abs().max()) > 1e-4 for gradient in expected.values())


@pytest.mark.parametrize("name", OBJECTIVES)
def test_metrics_of_one_rank(found: dict[str, Seen], alone: dict[str, Seen], name: str) -> None:
    (seen, _), (expected, _) = found[name], alone[name]
    assert seen.keys() == expected.keys()
    for key in expected.keys() - OF_THE_DIVISION:
        assert math.isclose(seen[key], expected[key], rel_tol=1e-5, abs_tol=1e-8), key
