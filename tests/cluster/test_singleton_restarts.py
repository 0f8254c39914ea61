"""The queue dies and hangs, on a made-up process: it is restarted, or its error ends the run."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from async_opd.cluster.supervision import SingletonActors
from async_opd.core.errors import (
    Displaced,
    ProcessDied,
    ProcessRestarts,
    StageError,
    first_cause,
)
from async_opd.waiting.waits import Waits
from tests.world.clock import settle
from tests.world.config import run_config
from tests.world.processes import FakeProcess


class World:
    """A queue that is supervised beside three others."""

    def __init__(self, tries: int = 2) -> None:
        self.process: Any = FakeProcess("queue")
        self.lines: list[str] = []
        self.reissued = asyncio.Semaphore(0)
        bounds = {"max_restarts": tries, "delay_s": 1e-3, "timeout_s": 1}
        others: list[Any] = [FakeProcess(name) for name in ("scorer", "rollouter", "trainer")]
        waits = Waits(self.lines.append)
        config = run_config(supervision=bounds)
        _, self.rollouter, self.trainer = others
        stages = self.process, *others
        self.singles = SingletonActors(config, self.lines.append, *stages, waits)

    async def run(self) -> None:
        """Supervision begins."""
        self.running = asyncio.create_task(self.singles.supervise(self._reissue, lambda: 0))
        await settle(2)

    async def _reissue(self) -> None:
        self.reissued.release()

    async def until_reissued(self) -> None:
        await asyncio.wait_for(self.reissued.acquire(), 5)

    async def dies(self) -> None:
        self.process.die()
        await self.until_reissued()

    @property
    def built(self) -> tuple[int, int]:
        """The number of the process now, and all builds."""
        return self.process.number, self.process.builds


@pytest.fixture
async def world() -> AsyncIterator[World]:
    made = World()
    await made.run()
    yield made
    made.running.cancel()


async def test_a_process_that_dies_is_built_and_its_content_issued_again(world: World) -> None:
    await world.dies()
    assert world.process.builds == 1
    assert world.lines == [
        "queue is ejected: queue: its process died",
        "queue is being rebuilt",
        "queue is rebuilt",
    ]


@pytest.mark.parametrize("rank", [0, 1])
async def test_a_trainer_that_does_not_reach_the_queues_next_process_counts_as_dead(
    world: World, rank: int
) -> None:
    """It was cut off when Ray published where that is: its calls would wait for minutes."""
    world.trainer.others = (FakeProcess("trainer/1"),)
    world.trainer.ranks[rank].cut_off = True
    await world.dies()
    with pytest.raises(ExceptionGroup) as caught:
        await asyncio.wait_for(world.running, 5)
    error = first_cause(caught.value)
    assert isinstance(error, ProcessDied)
    assert (error.stage, "the queue's new process" in error.cause) == ("trainer", True)


@pytest.mark.parametrize("name", ["scorer", "rollouter"])
async def test_a_stage_that_does_not_reach_the_queues_next_process_is_built_again(
    world: World, name: str
) -> None:
    stage = world.singles.members[name]
    stage.value.remote.cut_off = True
    await world.dies()
    await asyncio.wait_for(world.singles.members.until(lambda: stage.incarnation == 1), 5)
    assert any(line.startswith(f"{name} is ejected: {name}: it does not") for line in world.lines)


async def test_a_replica_that_does_not_reach_the_queues_next_process_is_ended(
    world: World,
) -> None:
    one, other = world.rollouter.engines = (FakeProcess("student/0"), FakeProcess("student/1"))
    one.cut_off = True
    await world.dies()
    await settle()
    assert (one.gone, other.gone) == (True, False)
    assert any(line.startswith("student/0: it does not reach the queue") for line in world.lines)


async def test_too_many_restarts_end_it_for_good_with_its_error(world: World) -> None:
    world.process.broken = 9
    world.process.die()
    with pytest.raises(ExceptionGroup) as caught:
        await asyncio.wait_for(world.running, 5)
    assert isinstance(first_cause(caught.value), StageError)
    assert (world.process.builds, world.process.gone) == (2, True)


async def test_one_that_hangs_is_ended_and_built_again(world: World) -> None:
    world.process.hangs = True
    await world.until_reissued()
    assert "a sign of life took longer than 1 s" in world.lines[0]


async def test_a_build_that_fails_is_tried_again_in_another_process(world: World) -> None:
    world.process.broken = 1
    await world.dies()
    assert world.built == (3, 2)


async def test_a_process_that_died_while_nobody_watched_is_built_again() -> None:
    world = World()
    world.process.die()
    await world.run()
    await world.until_reissued()
    assert world.process.builds == 1
    world.running.cancel()


async def test_restarts_count_over_all_pipelines_of_a_run() -> None:
    world = World(tries=1)
    await world.run()
    await world.dies()
    world.running.cancel()
    await world.run()
    world.process.die()
    with pytest.raises(ExceptionGroup):
        await asyncio.wait_for(world.running, 5)


FAILURES = [
    ProcessRestarts("queue", "its process died during a state request: unavailable"),
    StageError("queue", "the network between its machine and this one failed"),
]


@pytest.mark.parametrize("answers", ["always", "again", "never"])
@pytest.mark.parametrize("failure", FAILURES)
@pytest.mark.slow
async def test_a_process_that_cannot_be_reached_is_replaced_also_if_it_answers(
    world: World, failure: StageError, answers: str
) -> None:
    if answers == "always":  # only one call has failed
        queue = world.singles.members["queue"]
        world.singles.members.fail(queue, queue.incarnation, failure)
    asked, refused = world.process.is_built, 0

    async def unreachable(timeout_s: float) -> bool:
        nonlocal refused
        if world.process.number == 1 and (refused < 3 or answers == "never"):
            refused += 1
            raise failure
        return bool(await asked(timeout_s))

    if answers != "always":
        world.process.is_built = unreachable
    await world.until_reissued()
    assert world.built == (2, 1)


async def test_no_restart_is_counted_of_a_process_whose_machine_is_lost() -> None:
    world = World(tries=1)
    world.process.displacement = Displaced("queue", "machine-c (10.0.0.3) is lost")
    await world.run()
    for _ in range(3):
        await world.dies()
    assert world.lines[1] == "queue is being rebuilt, after: queue: machine-c (10.0.0.3) is lost"
    assert (world.process.builds, world.process.gone) == (3, False)
    world.running.cancel()
