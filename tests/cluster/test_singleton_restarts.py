"""The queue dies and hangs, on a made-up process: it is restarted, or its error ends the run."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from async_opd.cluster.supervision import SingletonActors
from async_opd.config.run_config import RunConfig
from async_opd.core.errors import (
    Displaced,
    EngineStartError,
    ProcessDied,
    ProcessRestarts,
    StageError,
    StageTimeout,
    first_cause,
)
from async_opd.waiting.waits import Waits


class Process:
    """What a Remote with ``restarts`` looks like from outside; it is its own box, too."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.remote: Any = self
        self.ranks = (self,)
        self.number = 1
        self.built = True
        self.hangs = False
        self.gone = False
        self.death = asyncio.Event()
        self.builds = 0
        self.broken = 0  # builds that fail
        self.displacement: Displaced | None = None

    async def is_built(self, timeout_s: float) -> bool:
        if self.hangs:
            raise StageTimeout(self.name, f"a sign of life took longer than {timeout_s:g} s")
        return self.built

    async def end(self) -> ProcessDied:
        await self.death.wait()
        return ProcessRestarts(self.name, "its process died")

    async def displaced(self) -> Displaced | None:
        return self.displacement

    def restart(self) -> None:
        self.hangs = False
        self.die()

    def die(self) -> None:
        self.number += 1
        self.built = False
        self.death.set()
        self.death = asyncio.Event()

    def kill(self) -> None:
        self.gone = True

    async def supply(self) -> None:
        await asyncio.Event().wait()

    async def build(self) -> None:
        self.builds += 1
        if self.broken:
            self.broken -= 1
            raise EngineStartError(self.name, "did not start")
        self.built = True


def config(supervision: dict[str, float]) -> RunConfig:
    return RunConfig.model_validate(
        {
            "student": {"model": "student"},
            "teachers": {"t": {"model": "t"}},
            "data": {"train": "prompts.jsonl"},
            "supervision": supervision,
        }
    )


class World:
    def __init__(self, tries: int = 2) -> None:
        self.process: Any = Process("queue")
        self.told: list[str] = []
        self.reissued = asyncio.Semaphore(0)
        bounds = {"max_restarts": tries, "delay_s": 1e-3, "timeout_s": 1}
        others: list[Any] = [Process(name) for name in ("scorer", "rollouter", "trainer")]
        stages = self.process, *others
        waits = Waits(self.told.append)
        self.singles = SingletonActors(config(bounds), self.told.append, *stages, waits)
        self.run()

    def run(self) -> None:
        self.running = asyncio.create_task(self.singles.supervise(self._reissue, lambda: 0))

    async def _reissue(self) -> None:
        self.reissued.release()

    async def until_reissued(self) -> None:
        await asyncio.wait_for(self.reissued.acquire(), 5)


async def test_a_process_that_dies_is_built_again_and_what_it_held_is_issued_again() -> None:
    world = World()
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    world.process.die()
    await world.until_reissued()
    assert world.process.builds == 1
    assert world.told == [
        "queue is ejected: queue: its process died",
        "queue is being rebuilt",
        "queue is rebuilt",
    ]
    world.running.cancel()


async def test_one_that_hangs_is_ended_and_built_again() -> None:
    world = World()
    await asyncio.sleep(0)
    world.process.hangs = True
    await world.until_reissued()
    assert "a sign of life took longer than 1 s" in world.told[0]
    world.running.cancel()


async def test_a_build_that_fails_is_tried_again() -> None:
    world = World()
    world.process.broken = 1
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    world.process.die()
    await world.until_reissued()
    assert world.process.builds == 2
    world.running.cancel()


async def test_too_many_restarts_end_it_for_good_with_its_error() -> None:
    world = World(tries=2)
    world.process.broken = 9
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    world.process.die()
    with pytest.raises(ExceptionGroup) as caught:
        await asyncio.wait_for(world.running, 5)
    assert isinstance(first_cause(caught.value), StageError)
    assert (world.process.builds, world.process.gone) == (2, True)


async def test_a_process_that_died_while_nobody_watched_is_built_again() -> None:
    world = World()
    world.process.die()
    await world.until_reissued()
    assert world.process.builds == 1
    world.running.cancel()


async def test_restarts_count_over_all_pipelines_of_a_run() -> None:
    world = World(tries=1)
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    world.process.die()
    await world.until_reissued()
    world.running.cancel()
    world.run()
    await asyncio.sleep(0)
    world.process.die()
    with pytest.raises(ExceptionGroup):
        await asyncio.wait_for(world.running, 5)


async def test_a_build_that_fails_for_another_reason_than_its_death_gets_another_process() -> None:
    world = World()
    world.process.broken = 1
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    world.process.die()
    await world.until_reissued()
    assert world.process.number == 3
    world.running.cancel()


@pytest.mark.parametrize(
    "failure",
    [
        ProcessRestarts("queue", "its process died during a state request: unavailable"),
        StageError("queue", "the network between its machine and this one failed"),
    ],
)
async def test_a_process_that_lives_after_a_failed_call_does_not_go_on_beside_its_successor(
    failure: StageError,
) -> None:
    world = World()
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    queue = world.singles.members["queue"]
    world.singles.members.fail(queue, queue.incarnation, failure)
    await world.until_reissued()
    assert (world.process.number, world.process.builds) == (2, 1)
    world.running.cancel()


async def test_a_process_that_cannot_be_reached_is_ended_and_built_again() -> None:
    world = World()
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    asked = world.process.is_built

    async def unreachable(timeout_s: float) -> bool:
        if world.process.number == 1:
            raise StageError("queue", "the network between its machine and this one failed")
        return bool(await asked(timeout_s))

    world.process.is_built = unreachable
    await world.until_reissued()
    assert (world.process.number, world.process.builds) == (2, 1)
    world.running.cancel()


@pytest.mark.parametrize("answers", [True, False])
async def test_a_process_that_cannot_be_reached_for_a_while_does_not_go_on_beside_its_successor(
    answers: bool,
) -> None:
    world = World()
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    asked, refused = world.process.is_built, 0

    async def unavailable(timeout_s: float) -> bool:
        nonlocal refused
        if world.process.number == 1 and (refused < 3 or not answers):
            refused += 1
            raise ProcessRestarts("queue", "its process died during a state request: unavailable")
        return bool(await asked(timeout_s))

    world.process.is_built = unavailable
    await world.until_reissued()
    assert (world.process.number, world.process.builds) == (2, 1)
    world.running.cancel()


async def test_no_restart_is_counted_of_a_process_whose_machine_is_lost() -> None:
    world = World(tries=1)
    world.process.displacement = Displaced("queue", "machine-c (10.0.0.3) is lost")
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    for _ in range(3):
        world.process.die()
        await world.until_reissued()
    assert world.told[1] == "queue is being rebuilt, after: queue: machine-c (10.0.0.3) is lost"
    assert (world.process.builds, world.process.gone) == (3, False)
    world.running.cancel()
