"""Two ranks keep what each fetched, and compute it again with the same bits."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from async_opd.config.run_config import RunConfig
from async_opd.core.samples import Sample
from async_opd.core.scores import TopK
from async_opd.files.kept_steps import KEPT, kept_name
from benchmarks.local_ranks import in_processes
from tests.tools.replay import kept
from tests.trainer.models import tiny_model
from trainer.batches.shares import fetch
from trainer.batches.token_weights import TokenWeighting
from trainer.follower import Follower
from trainer.learner import Learner
from trainer.losses import build_objective
from trainer.rank import Rank
from trainer.rank_group import SINGLE_RANK, RankGroup, RankSpec
from trainer.replay.keeper import Keeper
from trainer.replay.kept_step import read_kept, write_kept
from trainer.replay.replayer import Recomputed, Replayer
from trainer.student.placed import PlacedStudent
from trainer.student.sharding import join_mesh

pytestmark = pytest.mark.slow

CPU = torch.device("cpu")
STEPS = range(1, 5)
QUANTITIES = ("weight", "gap", "loss", "gradient_share")


class Scored:
    """The queue of one process: the batch of step i under lease i."""

    def __init__(self, config: RunConfig) -> None:
        self.config = config

    async def fetch(self, topic: str, leased: Any) -> Any:
        from async_opd.core.batch import Batch

        ((lease, uids),) = leased.items()
        return Batch.pack(s for s in kept.batch(self.config, lease) if s.rollout.uid in uids)


def ranks(config: RunConfig, folder: Path) -> dict[str, list[Recomputed]]:
    """Two ranks train the steps as in a run, go back, and compute them again from the files.

    Each fetches its samples, and keeps them. Then they do so with a score that was changed.
    """
    scored: Any = Scored(config)

    def rank_of(spec: RankSpec) -> Rank:
        mesh = join_mesh(spec, CPU, 1)
        rank = Rank(
            PlacedStudent(tiny_model(), build_objective(config.loss), config.train, CPU, mesh=mesh)
        )
        rank.keeper = Keeper(config, spec.rank, spec.ranks, rank.platform())
        return rank

    def lead(spec: RankSpec | None, rank_group: Any) -> dict[str, list[Recomputed]]:
        assert spec is not None
        rank = rank_of(spec)
        learner = Learner(rank, TokenWeighting(auto=True), rank_group)
        start = folder / "start"
        start.mkdir()
        learner.capture(0)
        learner.write(str(start))
        for step in STEPS:
            trained_by_fetching(learner, rank_group, scored, step)
        learner.compared("flush_records")
        rank.keeper = None
        rank_group.failure = SINGLE_RANK.failure  # pipes end an order that meets it
        replayer = Replayer(learner, rank_group)
        equal = asyncio.run(replayed(replayer, start, folder))
        change_a_score(folder / KEPT / kept_name(2, 1, 2))
        return {"equal": equal, "changed": asyncio.run(replayed(replayer, start, folder))}

    found = in_processes(2, lead, lambda spec: Follower(rank_of(spec), scored), 120)
    assert isinstance(found, dict)
    return found


def trained_by_fetching(learner: Learner, rank_group: RankGroup, scored: Any, step: int) -> None:
    batch = kept.batch(scored.config, step)
    plan = learner.plan([sample.header for sample in batch])
    own, *others = plan.shares([step] * len(batch), rank_group.ranks, step)
    rank_group.dispatch("fetch", [(share,) for share in others])()
    first = asyncio.run(fetch(scored, own, learner.vocabularies))
    learner.train(plan, first.micro_batches, 0.0, step)


async def replayed(replayer: Replayer, start: Path, folder: Path) -> list[Recomputed]:
    await replayer.start(str(start))
    files = [[str(folder / KEPT / kept_name(n, rank, 2)) for rank in range(2)] for n in STEPS]
    return [await replayer.step(paths) for paths in files]


def change_a_score(path: Path) -> None:
    step = read_kept(path)
    first, *others = step.samples
    assert isinstance(first.scores, TopK)
    scores = replace(first.scores, logprobs=first.scores.logprobs - np.float32(0.5))
    write_kept(path, replace(step, samples=(Sample(first.rollout, scores), *others)))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("ranks")


@pytest.fixture(scope="module")
def found(folder: Path) -> dict[str, list[Recomputed]]:
    return ranks(kept.config_of(folder, "train.ranks=2"), folder)


def test_two_ranks_replay_bit_by_bit(found: dict[str, list[Recomputed]], folder: Path) -> None:
    assert [one.weights for one in found["equal"]] == [()] * len(STEPS)
    assert [one.quantities for one in found["equal"]] == [
        read_kept(folder / KEPT / kept_name(step, 1, 2)).record.result.quantities for step in STEPS
    ]


def test_two_ranks_have_the_automatic_weights_of_teachers_that_one_has(
    found: dict[str, list[Recomputed]], tmp_path: Path
) -> None:
    config = kept.config_of(tmp_path)
    rank = Rank(PlacedStudent(tiny_model(), build_objective(config.loss), config.train, CPU))
    alone = Learner(rank, TokenWeighting(auto=True))
    for step, several in zip(STEPS, found["equal"], strict=True):
        metrics = alone.train_batch(kept.batch(config, step)).metrics
        names = [f"teacher/{name}/{key}" for name in config.teachers for key in QUANTITIES]
        assert [float.fromhex(several.quantities[name]) for name in names] == pytest.approx(
            [metrics[name] for name in names], rel=1e-4
        )
        assert metrics["loss/total"] == pytest.approx(
            float.fromhex(several.quantities["loss/total"]), rel=1e-4
        )


def test_each_rank_keeps_what_it_computes(found: dict[str, list[Recomputed]], folder: Path) -> None:
    files = [read_kept(folder / KEPT / kept_name(3, rank, 2)) for rank in range(2)]
    first, second = [{sample.rollout.uid for sample in file.samples} for file in files]
    assert first
    assert second
    assert not first & second


def test_a_score_that_differs_on_the_second_rank_is_seen_in_the_weights_of_both(
    found: dict[str, list[Recomputed]],
) -> None:
    assert [bool(one.weights) for one in found["changed"]] == [False, True, True, True]
    assert [one.rank for one in found["changed"][1].weights] == [0, 1]
