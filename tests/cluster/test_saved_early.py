"""The student of a run that ends before its time, whose trainer shares the engines' GPUs."""

from __future__ import annotations

import asyncio
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from async_opd.cluster.launch import LaunchedStages
from async_opd.core.errors import ProcessDied, StageError
from async_opd.sharing.gpu_turns import GpuTurns
from tests.world.config import run_config


class Ending:
    """The trainer and the rollout stage's actor; engines have responses that never end."""

    def __init__(self, ranks: int, colocated: bool = True, teacher: bool = False) -> None:
        self.ranks, self.turns = ranks, GpuTurns(0.0)
        self.calls: list[str] = []
        place = {"placement": "colocated", "with": "train"} if colocated else {}
        shares = {"placement": "colocated", "with": "rollout"} if teacher else {}
        teachers = {"a": {"model": "a", **shares}}
        config = run_config(teachers=teachers, train={"ranks": ranks}, rollout=place)
        own: Any = self
        singletons: Any = SimpleNamespace(config=config, rollouter=self)
        self.stages = LaunchedStages(own, own, own, own, own, singletons, own)
        self.gathers = colocated and ranks > 1

    async def save(self, directory: str) -> None:
        if self.gathers:
            async with self.turns:
                self.calls.append(f"saves {directory}")
        else:
            self.calls.append(f"saves {directory}")

    async def stop(self, bound: float) -> None:
        self.calls.append("no supervision")

    async def halt_replicas(self, bound: float) -> None:
        self.calls.append("engines sleep")

    async def wait_asleep(self, pool: str) -> None:
        self.calls.append("teachers sleep")

    async def wait_for_work(self, pool: str) -> None:
        await self.turns.wanted()

    async def take_turn(self, pool: str) -> None:
        await self.turns.take(self._moved("onloads"), self._moved("offloads"))

    def _moved(self, what: str) -> Any:
        async def move() -> None:
            self.calls.append(what)

        return move


@pytest.mark.parametrize("teacher", [False, True], ids=["alone", "with a teacher"])
async def test_several_ranks_get_their_gpus_without_a_wait_for_responses(teacher: bool) -> None:
    made = Ending(ranks=2, teacher=teacher)
    await asyncio.wait_for(made.stages.save_early("model"), 5)
    sleep = ["teachers sleep"] if teacher else []
    expected = ["no supervision", "engines sleep", *sleep, "onloads", "saves model"]
    assert made.calls[: len(expected)] == expected


async def stage_is_dead(made: Ending, *of: Any) -> None:
    raise ProcessDied("rollouter", "its process has ended")


async def turn_does_not_end(made: Ending, *of: Any) -> None:
    await made.turns.take(made._moved("onloads"), asyncio.Event().wait)  # type: ignore[arg-type]


async def turn_cannot_begin(made: Ending, *of: Any) -> None:
    raise StageError("trainer", "no memory for its weights")


async def disk_is_full(made: Ending, *of: Any) -> None:
    async with made.turns:
        raise StageError("trainer", "the disk is full")


@pytest.mark.parametrize(
    ("method", "fault", "cause"),
    [
        ("stop", stage_is_dead, None),
        ("take_turn", turn_does_not_end, None),
        ("take_turn", turn_cannot_begin, "no memory for its weights"),
        ("save", disk_is_full, "the disk is full"),
    ],
)
async def test_the_student_is_saved_unless_the_trainer_has_no_turn_or_cannot_save(
    method: str, fault: Any, cause: str | None
) -> None:
    made = Ending(ranks=2)
    setattr(made, method, partial(fault, made))
    saving = asyncio.wait_for(made.stages.save_early("model"), 5)
    if cause is None:
        await saving
        assert "saves model" in made.calls
        return
    with pytest.raises(StageError, match=cause):
        await saving


@pytest.mark.parametrize(("ranks", "colocated"), [(1, True), (2, False)])
async def test_a_trainer_without_turns_saves_beside_the_engines(
    ranks: int, colocated: bool
) -> None:
    made = Ending(ranks, colocated)
    await made.stages.save_early("model")
    assert made.calls == ["saves model"]
