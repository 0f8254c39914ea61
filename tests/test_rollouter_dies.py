"""The rollout stage dies at any moments of a run, in weight syncs and rebuilds too; on fakes.

Its replicas are called as over Ray: what they were asked goes on although nobody waits for it.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from async_opd.cluster.placement.gpu_bundles import GpuBundles
from async_opd.cluster.rollouter_actor import (
    Predecessor,
    RollouterService,
    StartedReplica,
    build_rollouter,
)
from async_opd.core.reports import SyncReport
from async_opd.core.samples import Prompt, Rollout
from async_opd.waiting.deadline import race
from async_opd.weight_sync.coordinator import Snapshot
from async_opd.weight_sync.layout import Rendezvous, WeightMeta
from tests.world.clock import settle
from tests.world.run import World, assert_each_trained_once, world
from tests.world.students import FakeStudent
from tests.world.sync import Sender
from tests.world.trainer import FakeTrainer

STEPS, BATCH = 8, 4


class Replica:
    """A student's replica in a process of its own; sampling stands still while it is paused."""

    def __init__(self, student: FakeStudent) -> None:
        self.student = student
        self.name = self.consumer = student.name
        self.flowing = asyncio.Event()
        self.flowing.set()
        self.calls: set[asyncio.Task[Any]] = set()
        sample = student.sample

        async def held(prompt: Prompt, uid: str) -> Rollout:
            await self.flowing.wait()
            return await sample(prompt, uid)

        student.sample = held  # type: ignore[method-assign]

    def __getattr__(self, name: str) -> Any:
        async def call(*args: Any) -> Any:
            own = hasattr(type(self), f"_{name}")
            method = getattr(self, f"_{name}") if own else getattr(self.student, name)
            task = asyncio.create_task(method(*args))
            self.calls.add(task)
            task.add_done_callback(self.calls.discard)
            return await asyncio.shield(task)

        return call

    def kill(self) -> None:
        raise AssertionError("a replica that lives was ended")

    async def _join(self, rendezvous: Rendezvous, rank_offset: int) -> None:
        await self.student.pace.wait()

    async def _pause(self, on_sync: str) -> None:
        self.flowing.clear()
        await self.student.pace.wait()

    async def _receive(self, meta: WeightMeta) -> None:
        assert not self.flowing.is_set()
        await self.student.pace.wait()

    async def _finish(self, version: int) -> None:
        self.student.version = version

    async def _resume(self) -> None:
        await self.student.pace.wait()
        self.flowing.set()


class PacedSender(Sender):
    """The trainer's end of the weight sync, at any speed."""

    def __init__(self, trainer: FakeTrainer) -> None:
        super().__init__()
        self.trainer = trainer

    async def connect(self, group: int) -> None:
        await self.trainer.pace.wait()

    async def send(self, group: int) -> float:
        await self.trainer.pace.wait()
        return await super().send(group)

    async def snapshot(self, version: int, compare: bool = False) -> WeightMeta:
        await self.trainer.pace.wait()
        self.trainer.version = version
        return await super().snapshot(version, compare)


class MortalRollouter:
    """The actor and the driver's end of it: calls that break off are made again."""

    def __init__(self, run: World) -> None:
        self.run_ = run
        self.replicas = [Replica(student) for student in run.students]
        self.newest: Snapshot | None = None
        self.snapshots = False
        self.deaths = 0
        self._death, self._built = asyncio.Event(), asyncio.Event()
        self._service: RollouterService | None = None

    async def build(self) -> None:
        parts: list[Any] = [self.run_.queue, PacedSender(self.run_.trainer), self.run_.scorer]
        replicas: list[Any] = [StartedReplica(replica, 1) for replica in self.replicas]  # type: ignore[arg-type]
        before = Predecessor(self.newest, behind=self.snapshots)
        given = (*parts, GpuBundles(), before)
        self._service = await build_rollouter(self.run_.pipeline.config, replicas, *given)
        self._built.set()

    async def die(self) -> None:
        dying, self._service = self._service, None
        self._built.clear()
        death, self._death = self._death, asyncio.Event()
        death.set()
        if dying is not None and dying._work is not None:
            dying._work.cancel()
            with suppress(asyncio.CancelledError):
                await dying._work
        self.deaths += 1

    async def snapshot(self, version: int, again: bool = False) -> None:
        self.newest, self.snapshots = None, True
        self.newest = version, await self._again("snapshot", version)

    async def push(self) -> SyncReport:
        report: SyncReport = await self._again("push")
        return report

    def __getattr__(self, name: str) -> Any:
        return lambda *args, **named: self._again(name, *args, **named)

    async def _again(self, name: str, *args: Any, **named: Any) -> Any:
        over = object()

        async def died(death: asyncio.Event) -> object:
            await death.wait()
            return over

        while True:
            while (service := self._service) is None:
                await self._built.wait()
            work = getattr(service, name)(*args, **named)
            try:
                found = await race(died(self._death), work)
            except asyncio.CancelledError:
                if asyncio.current_task().cancelling():  # type: ignore[union-attr]
                    raise
                found = over
            if found is not over:
                return found


@pytest.mark.filterwarnings("ignore:coroutine .* was never awaited")  # it died before they began
@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 2**16),
    deaths=st.lists(st.tuples(st.integers(0, 120), st.integers(0, 20)), max_size=5),
)
@pytest.mark.slow
def test_whenever_the_rollouter_dies_each_sample_is_trained_once(
    seed: int, deaths: list[tuple[int, int]]
) -> None:
    asyncio.run(_survives(seed, deaths))


async def _survives(seed: int, deaths: list[tuple[int, int]]) -> None:
    run = world(seed, steps=STEPS, batch_size=BATCH, k=2)
    mortal = MortalRollouter(run)
    stages: Any = run.pipeline.stages
    stages.rollouter = stages.sync = mortal
    await mortal.build()
    killing = asyncio.create_task(_kills(mortal, deaths))
    try:
        await run.run()
    finally:
        killing.cancel()
        for replica in mortal.replicas:
            for call in replica.calls:
                call.cancel()
    assert_each_trained_once(run, STEPS)
    assert run.log.dead == []
    assert [student.version for student in run.students] == [STEPS // 2] * len(run.students)


async def _kills(mortal: MortalRollouter, deaths: list[tuple[int, int]]) -> None:
    """After so many turns of the event loop it dies, and after so many is there again."""
    for before, until in deaths:
        await settle(before)
        await mortal.die()
        await settle(until)
        await mortal.build()
