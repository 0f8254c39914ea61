"""Queue, scorer, rollouter and trainer as new after the trainer's death, on made-up processes."""

from __future__ import annotations

import asyncio
from itertools import count
from types import SimpleNamespace
from typing import Any

import pytest

from async_opd.cluster.singleton_actors import ScorerActor, TrainerActor
from async_opd.cluster.supervision import SingletonActors
from async_opd.core.errors import ProcessDied, StageError, StageTimeout
from async_opd.processes.members import Restarts
from async_opd.waiting.waits import Waits
from tests.world.clock import settle
from tests.world.config import run_config
from tests.world.processes import FakeProcess

DIED = ProcessDied("trainer", "its process died")


def singletons(
    events: list[str], hangs: str = "", built: bool = False, tries: int = 5
) -> SingletonActors:
    """``built``: the trainer's process has not died, it is stuck."""
    config = run_config(supervision={"max_restarts": tries, "delay_s": 1e-3})
    names = ("queue", "scorer", "rollouter", "trainer")
    actors: list[Any] = [FakeProcess(name, events, hangs=hangs == name) for name in names]
    actors[3].built = built
    return SingletonActors(config, lambda text: None, *actors, Waits(print))


def tried(made: SingletonActors) -> int:
    """Tries to rebuild the trainer."""
    (trainer,) = made.trainers.all
    return len(made.trainers._restarts[trainer]._remembered)


async def test_replicas_stop_and_the_scorer_ends_before_the_queue_and_all_are_built_again() -> None:
    events: list[str] = []
    await singletons(events).rebuild_all(DIED)
    assert events == [
        "stop rollouter",
        "halt replicas",
        "hand_over scorer",
        "close queue",
        "build queue",
        "build scorer",
        "build rollouter",
        "build trainer",
    ]


async def test_no_rank_is_built_before_the_teachers_on_its_gpu_sleep() -> None:
    events: list[str] = []
    made, asleep = singletons(events), asyncio.Event()

    async def build() -> None:
        await asleep.wait()

    scorer: Any = made.scorer
    scorer.build = build
    rebuilding = asyncio.create_task(made.rebuild_all(DIED))
    await settle(50)
    assert "build trainer" not in events
    asleep.set()
    await rebuilding
    assert "build trainer" in events


async def test_handing_over_may_last_longer_than_one_colocated_teachers_sleep() -> None:
    shared = {"placement": "colocated", "with": "train", "health": {"timeout_s": 300}}
    config = run_config(
        teachers={
            "own": {"model": "t", "health": {"timeout_s": 900}},
            "guest": {"model": "t"} | shared,
        }
    )
    bounds: list[float] = []

    class Records:
        async def call(self, method: str, timeout_s: float) -> Any:
            bounds.append(timeout_s)
            return {}, None

    unused: Any = None
    remote: Any = Records()
    await ScorerActor(remote, config, {}, unused, unused, unused).hand_over(60)
    assert bounds == [60 + 300]


@pytest.mark.parametrize("hangs", ["queue", "scorer", "rollouter", "trainer"])
async def test_one_that_hangs_gets_another_process(hangs: str) -> None:
    events: list[str] = []
    await singletons(events, hangs).rebuild_all(DIED)
    assert f"restart {hangs}" in events
    assert f"build {hangs}" in events


async def test_every_rank_of_a_trainer_that_is_not_dead_but_stuck_gets_another_process() -> None:
    events: list[str] = []
    made = singletons(events, built=True)
    trainer: Any = made.trainer
    trainer.others = (
        FakeProcess("trainer/1", events),
        FakeProcess("trainer/2", events, hangs=True),
    )
    await made.rebuild_all(DIED)
    assert events[0] == "restart trainer"
    restarted = {event for event in events if event.startswith("restart trainer")}
    assert restarted == {"restart trainer", "restart trainer/1", "restart trainer/2"}


@pytest.mark.parametrize("name", ["queue", "rollouter"])
async def test_a_stage_with_nothing_yet_gets_another_process_and_replicas_stop(name: str) -> None:
    events: list[str] = []
    made = singletons(events)
    unbuilt: Any = getattr(made, name)
    unbuilt.built = False
    await made.rebuild_all(DIED)
    assert f"restart {name}" in events
    assert "halt replicas" in events[:2]
    if name == "rollouter":
        assert events[:2] == ["restart rollouter", "halt replicas"]
    assert not {"close queue", "stop rollouter"} & set(events) & {f"close {name}", f"stop {name}"}


@pytest.mark.parametrize("broken", ["queue", "scorer", "rollouter", "trainer"])
async def test_one_that_dies_while_it_is_built_again_is_one_more_death(broken: str) -> None:
    events: list[str] = []
    made = singletons(events)
    box: Any = getattr(made, broken)
    box.broken = 2
    await made.rebuild_all(DIED)
    assert events.count(f"build {broken}") == 3
    assert tried(made) == 3
    assert events[-1] == "build trainer"


async def test_a_queue_that_dies_while_the_others_are_built_is_one_more_death() -> None:
    events: list[str] = []
    made = singletons(events)
    scorer: Any = made.scorer
    scorer.waits_for = made.queue
    await asyncio.wait_for(made.rebuild_all(DIED), 5)
    assert (events.count("build queue"), tried(made)) == (2, 2)


async def test_deaths_while_it_is_built_again_come_to_an_end_with_the_last_ones_error() -> None:
    made = singletons([], tries=3)
    trainer: Any = made.trainer
    trainer.broken = 9
    with pytest.raises(StageError, match="did not start"):
        await made.rebuild_all(DIED)
    assert tried(made) == 3


async def test_ranks_that_wait_for_one_that_died_get_other_processes() -> None:
    events: list[str] = []
    made = singletons(events)
    trainer: Any = made.trainer
    trainer.others, trainer.broken = (FakeProcess("trainer/1", events),), 1
    await made.rebuild_all(DIED)
    between = events[events.index("build trainer") + 1 :]
    assert between[:2] == ["restart trainer", "restart trainer/1"]


async def test_a_trainer_that_always_dies_at_the_same_step_comes_to_an_end() -> None:
    made = singletons([], tries=2)
    (trainer,) = made.trainers.all
    made.trainers._restarts[trainer] = Restarts(made.config.supervision, count(0, 3600).__next__)
    made._step = lambda: 7
    await made.rebuild_all(DIED)
    await made.rebuild_all(DIED)
    with pytest.raises(ProcessDied):
        await made.rebuild_all(DIED)


async def test_no_rank_is_started_before_all_of_them_have_their_gpus() -> None:
    """The start of one that waits for the others has a bound; a cluster without GPUs has none."""
    events: list[str] = []
    placed = asyncio.Event()

    def rank(number: int) -> Any:
        async def listen(*of: Any) -> tuple[str, int, int]:
            events.append("listens")
            return "127.0.0.1", 1, 2

        async def build(*of: Any) -> None:
            events.append(f"builds {number}")

        return SimpleNamespace(placed=placed.wait, listen=listen, build=build)

    config = singletons([]).config
    args = (config, "cpu", None)
    trainer = TrainerActor(rank(0), config, "cpu", "a:b", args, (rank(1),))
    building = asyncio.create_task(trainer.build())
    await settle(5)
    assert events == []
    placed.set()
    await building
    assert events == ["listens", "builds 0", "builds 1"]


async def test_nothing_is_built_again_on_the_trainers_node_before_the_trainer_has_gpus() -> None:
    """The others' waits for a place have no bound; the trainer's has one."""
    events: list[str] = []
    made = singletons(events, tries=1)
    trainer: Any = made.trainer
    trainer.placement_fault = StageTimeout("trainer", "waiting for its GPUs took longer than 600 s")
    with pytest.raises(StageTimeout, match="waiting for its GPUs"):
        await made.rebuild_all(DIED)
    assert [event for event in events if event.startswith("build")] == []
