"""Which work of the trainer waits for a turn on GPUs that it shares with rollout engines."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from async_opd.sharing.gpu_turns import GpuTurns
from async_opd.weight_sync.layout import WeightMeta
from tests.trainer.models import bare_stage
from trainer.stage import TrainerStage


class Learner:
    """Notes its calls, which are those of its publisher too."""

    def __init__(self) -> None:
        self.done: list[str] = []
        self.unchanged = True

    def __getattr__(self, name: str) -> Any:
        def call(*arguments: Any) -> Any:
            self.done.append(name)
            return {"snapshot": WeightMeta((), (), (), ()), "restore": (1, 1)}.get(name)

        return call


class SeveralRanks:
    """A group of two ranks, of which none fails."""

    ranks = 2

    async def failure(self) -> Any:
        await asyncio.Event().wait()


def stage(**given: Any) -> tuple[TrainerStage, Learner]:
    learner: Any = Learner()
    batcher = SimpleNamespace(copy_held=lambda: None, hold=lambda samples: None)
    return bare_stage(learner, batcher, learner, turns=GpuTurns(0.0), **given), learner


async def test_a_snapshot_is_taken_in_a_turn() -> None:
    made, learner = stage()
    snapshot = asyncio.create_task(made.snapshot(1))
    await asyncio.wait_for(made.wait_for_backlog("rollout"), 5)
    assert learner.done == []
    await asyncio.wait_for(made.take_turn("rollout"), 5)
    await asyncio.wait_for(snapshot, 5)
    assert learner.done == ["onload", "snapshot", "offload"]


async def test_a_turn_that_is_begun_for_a_snapshot_ends_after_it() -> None:
    made, learner = stage()
    begun = asyncio.create_task(made.begin_turn("rollout"))
    await asyncio.wait_for(made.wait_for_work("rollout"), 5)
    turn = asyncio.create_task(made.take_turn("rollout"))
    await asyncio.wait_for(begun, 5)
    assert not turn.done()
    await asyncio.wait_for(made.snapshot(1), 5)
    await asyncio.wait_for(turn, 5)
    assert learner.done == ["onload", "snapshot", "offload"]


async def test_a_single_rank_saves_the_model_without_a_turn() -> None:
    made, learner = stage()
    await asyncio.wait_for(made.save("model"), 5)
    assert "onload" not in learner.done


async def in_a_turn(made: TrainerStage, work: Any, learner: Learner) -> list[str]:
    """What is done when work that waits for a turn gets one."""
    waiting = asyncio.create_task(work)
    await asyncio.wait_for(made.wait_for_work("rollout"), 5)
    await asyncio.wait_for(made.take_turn("rollout"), 5)
    await asyncio.wait_for(waiting, 5)
    return learner.done


async def test_several_ranks_gather_the_model_in_a_turn() -> None:
    made, learner = stage(rank_group=SeveralRanks())
    done = await in_a_turn(made, made.save("model"), learner)
    assert (done[0], done[-1], len(done)) == ("onload", "offload", 3)


@pytest.mark.parametrize("given", [{}, {"rank_group": SeveralRanks()}], ids=["one", "several"])
async def test_ranks_copy_their_state_without_a_turn(given: dict[str, Any]) -> None:
    made, learner = stage(**given)
    await asyncio.wait_for(made.capture(), 5)
    assert learner.done == ["capture"]


async def restored_in_a_turn(monkeypatch: pytest.MonkeyPatch) -> tuple[TrainerStage, Learner]:
    made, learner = stage()
    monkeypatch.setattr("trainer.saving.sample_file.read_scored", lambda folder: ())
    await in_a_turn(made, made.restore("checkpoint"), learner)
    return made, learner


async def test_a_restore_is_made_in_a_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    _, learner = await restored_in_a_turn(monkeypatch)
    assert learner.done == ["onload", "restore", "offload"]


async def test_samples_of_a_restored_version_may_be_of_other_weights(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made, learner = await restored_in_a_turn(monkeypatch)
    learner.unchanged = False  # as Learner.restore sets it
    found = []
    for version in (1, 2):
        await in_a_turn(made, made.snapshot(version), learner)
        found.append(learner.unchanged)
    assert found == [False, True]


async def test_samples_of_the_first_version_are_of_the_weights_that_were_sent() -> None:
    made, learner = stage()
    learner.unchanged = False  # a cold start's steps
    await in_a_turn(made, made.snapshot(0), learner)
    assert learner.unchanged
