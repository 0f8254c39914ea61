"""Which work of the trainer waits for a turn on GPUs that it shares with rollout engines."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from async_opd.waiting.gpu_turns import GpuTurns
from async_opd.weight_sync.layout import WeightMeta
from trainer.saving.state import TrainerState
from trainer.stage import TrainerStage


class Learner:
    def __init__(self) -> None:
        self.done: list[str] = []

    def __getattr__(self, name: str) -> Any:
        def call(*arguments: Any) -> dict[str, Any]:
            self.done.append(name)
            return {}

        return call


class Publisher:
    def __init__(self, learner: Learner) -> None:
        self.learner = learner

    def snapshot(self) -> WeightMeta:
        self.learner.done.append("snapshot")
        return WeightMeta((), (), (), ())


class Batcher:
    held = ()


class SeveralRanks:
    """A group of two ranks, of which none fails."""

    ranks = 2

    async def failure(self) -> Any:
        await asyncio.Event().wait()


def stage(**given: Any) -> tuple[TrainerStage, Learner]:
    learner: Any = Learner()
    publisher: Any = Publisher(learner)
    batcher: Any = Batcher()
    turns = GpuTurns(0.0)
    made = TrainerStage(
        learner, publisher, batcher, max_version_lag=None, model_dir="", turns=turns, **given
    )
    return made, learner


async def test_a_snapshot_is_taken_in_a_turn() -> None:
    made, learner = stage()
    snapshot = asyncio.create_task(made.snapshot(1))
    await asyncio.wait_for(made.wait_for_backlog("rollout"), 5)
    assert learner.done == []
    await asyncio.wait_for(made.take_turn("rollout"), 5)
    await asyncio.wait_for(snapshot, 5)
    assert learner.done == ["onload", "snapshot", "offload"]


@pytest.mark.parametrize("what", ["capture", "save"])
async def test_a_single_rank_copies_its_state_without_a_turn(what: str) -> None:
    made, learner = stage()
    await asyncio.wait_for(used(made, what), 5)
    assert "onload" not in learner.done


@pytest.mark.parametrize("what", ["capture", "save"])
async def test_several_ranks_gather_theirs_in_a_turn(what: str) -> None:
    ranks: Any = SeveralRanks()
    made, learner = stage(rank_group=ranks)
    work = asyncio.create_task(used(made, what))
    await asyncio.wait_for(made.wait_for_work("rollout"), 5)
    await asyncio.wait_for(made.take_turn("rollout"), 5)
    await asyncio.wait_for(work, 5)
    assert (learner.done[0], learner.done[-1], len(learner.done)) == ("onload", "offload", 3)


async def used(made: TrainerStage, what: str) -> None:
    if what == "capture":
        await made.capture()
    else:
        await made.save("model")


async def test_a_restore_is_made_in_a_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    made, learner = stage()
    found = TrainerState(1, 1, {}, ())
    monkeypatch.setattr("trainer.saving.state.read_state", lambda folder: found)
    monkeypatch.setattr(made._batcher, "hold", lambda samples: None, raising=False)
    work = asyncio.create_task(made.restore("checkpoint"))
    await asyncio.wait_for(made.wait_for_work("rollout"), 5)
    await asyncio.wait_for(made.take_turn("rollout"), 5)
    await asyncio.wait_for(work, 5)
    assert learner.done == ["onload", "restore", "offload"]
