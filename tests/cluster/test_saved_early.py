"""The student of a run that ends before its time, whose trainer shares the engines' GPUs."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from async_opd.cluster.launch import LaunchedStages
from async_opd.config.run_config import RunConfig
from async_opd.core.errors import ProcessDied, StageError
from async_opd.sharing.gpu_turns import GpuTurns


class Ending:
    """The trainer and the rollout stage's actor; engines have responses that never end."""

    def __init__(self, ranks: int, colocated: bool = True, teacher: bool = False) -> None:
        self.ranks, self.turns = ranks, GpuTurns(0.0)
        self.told: list[str] = []
        place = {"placement": "colocated", "with": "train"} if colocated else {}
        shares = {"placement": "colocated", "with": "rollout"} if teacher else {}
        config = RunConfig.model_validate(
            {
                "student": {"model": "s"},
                "teachers": {"a": {"model": "a", **shares}},
                "data": {"train": "rows.jsonl"},
                "train": {"ranks": ranks},
                "rollout": place,
            }
        )
        own: Any = self
        singletons: Any = SimpleNamespace(config=config, rollouter=self)
        self.stages = LaunchedStages(own, own, own, own, own, singletons, own)
        self.gathers = colocated and ranks > 1

    async def save(self, directory: str) -> None:
        if self.gathers:
            async with self.turns:
                self.told.append(f"saves {directory}")
        else:
            self.told.append(f"saves {directory}")

    async def stop(self, bound: float) -> None:
        self.told.append("no supervision")

    async def halt_replicas(self, bound: float) -> None:
        self.told.append("engines sleep")

    async def wait_asleep(self, pool: str) -> None:
        self.told.append("teachers sleep")

    async def wait_for_work(self, pool: str) -> None:
        await self.turns.wanted()

    async def take_turn(self, pool: str) -> None:
        await self.turns.take(self._moved("onloads"), self._moved("offloads"))

    def _moved(self, what: str) -> Any:
        async def move() -> None:
            self.told.append(what)

        return move


async def test_several_ranks_get_their_gpus_without_a_wait_for_responses() -> None:
    made = Ending(ranks=2)
    await asyncio.wait_for(made.stages.save_early("model"), 5)
    assert made.told[:4] == ["no supervision", "engines sleep", "onloads", "saves model"]


async def test_teachers_on_these_gpus_sleep_before_the_trainer_gets_them() -> None:
    made = Ending(ranks=2, teacher=True)
    await asyncio.wait_for(made.stages.save_early("model"), 5)
    assert made.told[2:5] == ["teachers sleep", "onloads", "saves model"]


async def test_a_rollout_stage_that_is_dead_keeps_no_model_from_being_saved(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = Ending(ranks=2)

    async def dies(bound: float) -> None:
        raise ProcessDied("rollouter", "its process has ended")

    monkeypatch.setattr(made, "stop", dies)
    await asyncio.wait_for(made.stages.save_early("model"), 5)
    assert "saves model" in made.told


async def test_an_end_of_the_turn_that_hangs_is_not_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = Ending(ranks=2)

    async def hangs(pool: str) -> None:
        await made.turns.take(made._moved("onloads"), asyncio.Event().wait)  # type: ignore[arg-type]

    monkeypatch.setattr(made, "take_turn", hangs)
    await asyncio.wait_for(made.stages.save_early("model"), 5)
    assert "saves model" in made.told


async def test_a_turn_that_cannot_begin_is_the_error_of_the_save(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = Ending(ranks=2)

    async def fails(pool: str) -> None:
        raise StageError("trainer", "no memory for its weights")

    monkeypatch.setattr(made, "take_turn", fails)
    with pytest.raises(StageError, match="no memory for its weights"):
        await asyncio.wait_for(made.stages.save_early("model"), 5)


@pytest.mark.parametrize(("ranks", "colocated"), [(1, True), (2, False)])
async def test_a_trainer_that_needs_no_turn_saves_beside_the_engines(
    ranks: int, colocated: bool
) -> None:
    made = Ending(ranks, colocated)
    await made.stages.save_early("model")
    assert made.told == ["saves model"]


async def test_a_trainer_that_cannot_save_says_so_and_its_turn_ends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = Ending(ranks=2)

    async def fails(directory: str) -> None:
        async with made.turns:
            raise StageError("trainer", "the disk is full")

    monkeypatch.setattr(made, "save", fails)
    with pytest.raises(StageError, match="the disk is full"):
        await asyncio.wait_for(made.stages.save_early("model"), 5)
