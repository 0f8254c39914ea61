"""The trainer's turns on GPUs that rollout engines use at other times, alone."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from async_opd.weight_sync.layout import WeightMeta
from tests.rollouter.test_stage import settle
from tests.timers import ManualTimer
from trainer.gpu_turns import GpuTurns
from trainer.saving.state import TrainerState
from trainer.stage import TrainerStage


class Gpu:
    """Writes down what is done on it."""

    def __init__(self, linger_s: float = 1.0) -> None:
        self.done: list[str] = []
        self.timer = ManualTimer()
        self.turns = GpuTurns(linger_s, self.timer)
        self.goes_on = asyncio.Event()
        self.goes_on.set()

    async def work(self, what: str) -> None:
        async with self.turns:
            self.done.append(what)
            await self.goes_on.wait()

    async def _onload(self) -> None:
        self.done.append("onload")

    async def _offload(self) -> None:
        self.done.append("offload")

    async def begins(self, what: str) -> asyncio.Task[None]:
        work = asyncio.create_task(self.work(what))
        await settle()
        return work

    async def turn(self) -> asyncio.Task[None]:
        taken = asyncio.create_task(self.turns.take(self._onload, self._offload))
        await settle()
        return taken

    async def lingers(self, seconds: float) -> None:
        self.timer.advance(seconds)
        await settle()


async def test_work_waits_for_a_turn_between_onload_and_offload() -> None:
    gpu = Gpu()
    await gpu.begins("step")
    assert gpu.done == []
    await gpu.turn()
    await gpu.lingers(1)
    assert gpu.done == ["onload", "step", "offload"]


async def test_work_that_comes_within_the_linger_time_is_of_the_same_turn() -> None:
    gpu = Gpu()
    await gpu.begins("step")
    await gpu.turn()
    await gpu.lingers(0.9)
    await gpu.begins("snapshot")
    await gpu.lingers(0.9)
    assert gpu.done == ["onload", "step", "snapshot"]
    await gpu.lingers(1)
    assert gpu.done[-1] == "offload"


async def test_a_turn_lasts_as_long_as_its_work() -> None:
    gpu = Gpu()
    gpu.goes_on.clear()
    await gpu.begins("step")
    await gpu.turn()
    await gpu.lingers(100)
    assert gpu.done == ["onload", "step"]


async def test_work_that_comes_after_a_turn_waits_for_the_next() -> None:
    gpu = Gpu()
    await gpu.begins("step")
    await gpu.turn()
    await gpu.lingers(1)
    await gpu.begins("snapshot")
    assert gpu.done[-1] == "offload"
    await gpu.turn()
    assert gpu.done[-1] == "snapshot"


async def test_without_work_no_turn_moves_anything() -> None:
    gpu = Gpu()
    assert (await gpu.turn()).done()
    assert gpu.done == []


async def test_work_that_is_cancelled_wants_no_turn_any_more() -> None:
    gpu = Gpu()
    work = await gpu.begins("step")
    await asyncio.wait_for(gpu.turns.wanted(), 5)
    work.cancel()
    await settle()
    wanted = asyncio.create_task(gpu.turns.wanted())
    await settle()
    assert not wanted.done()
    wanted.cancel()


async def test_a_turn_outlives_its_caller_and_is_over_when_it_has_offloaded() -> None:
    gpu = Gpu()
    gpu.goes_on.clear()
    await gpu.begins("step")
    caller = await gpu.turn()
    caller.cancel()
    over = asyncio.create_task(gpu.turns.over())
    await gpu.lingers(1)
    assert not over.done()
    gpu.goes_on.set()
    await settle()
    await gpu.lingers(1)
    await asyncio.wait_for(over, 5)
    assert gpu.done == ["onload", "step", "offload"]


async def test_an_onload_that_fails_is_the_error_of_the_turn_and_no_work_begins() -> None:
    gpu = Gpu()

    async def fails() -> None:
        raise MemoryError("out of memory")

    gpu._onload = fails  # type: ignore[method-assign]
    await gpu.begins("step")
    with pytest.raises(MemoryError):
        await (await gpu.turn())
    assert gpu.done == []


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


@pytest.mark.parametrize("what", ["capture", "save", "restore"])
async def test_a_single_rank_copies_its_state_without_a_turn(
    what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, learner = stage()
    await asyncio.wait_for(used(made, what, monkeypatch), 5)
    assert "onload" not in learner.done


@pytest.mark.parametrize("what", ["capture", "save", "restore"])
async def test_several_ranks_gather_theirs_in_a_turn(
    what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks: Any = SeveralRanks()
    made, learner = stage(rank_group=ranks)
    work = asyncio.create_task(used(made, what, monkeypatch))
    await asyncio.wait_for(made.wait_for_work("rollout"), 5)
    await asyncio.wait_for(made.take_turn("rollout"), 5)
    await asyncio.wait_for(work, 5)
    assert (learner.done[0], learner.done[-1], len(learner.done)) == ("onload", "offload", 3)


async def used(made: TrainerStage, what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if what == "capture":
        await made.capture()
    elif what == "save":
        await made.save("model")
    else:
        found = TrainerState(1, 1, {}, ())
        monkeypatch.setattr("trainer.saving.state.read_state", lambda folder: found)
        monkeypatch.setattr(made._batcher, "hold", lambda samples: None, raising=False)
        await made.restore("checkpoint")
