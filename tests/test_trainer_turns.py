"""The trainer and the rollout engines take turns on the same GPUs: the whole pipeline on fakes."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from async_opd.core.errors import ProcessDied
from async_opd.core.reports import Progress
from async_opd.core.stages import TRAINER
from async_opd.sharing.gpu_turns import GpuTurns
from async_opd.sharing.time_sharing import (
    GpuGuests,
    GpuLock,
    GpuTimeSharing,
    SeveralGuests,
)
from async_opd.waiting.deadline import gather_or_cancel
from teachers.stage import ScorerStage
from tests.properties import examples
from tests.world.clock import run_virtually, settle
from tests.world.config import changed
from tests.world.gpus import Gpu, GuestTeacher, Host, alive, gate_student, gate_sync, uids_of
from tests.world.prompts import TEACHERS
from tests.world.run import World, evaluation, world
from tests.world.sync import LockedSync
from tests.world.trainer import Disk


class Trainer:
    """The trainer as a guest: nothing but the moves of its turns, and what happens at each."""

    def __init__(self, gpu: Gpu, hosts: Sequence[Host], linger_s: float) -> None:
        self.gpu, self.hosts = gpu, hosts
        self.turns = GpuTurns(linger_s)
        self.number = 0
        self.dies_at = ""

    async def _reach(self, stage: str) -> None:
        await settle(3)
        if self.dies_at == stage:
            raise ProcessDied(TRAINER, "its process died")

    async def _onload(self) -> None:
        for host in self.hosts:
            assert host.dead or (host.gate.closed and not host.requests), "an engine is awake"
        self.gpu.take("trainer")
        await self._reach("onload")

    async def _offload(self) -> None:
        await self._reach("offload")
        self.gpu.leave("trainer")

    async def work(self, work: Callable[[], Awaitable[Any]]) -> Any:
        async with self.turns:
            assert self.gpu.awake == {"trainer"}
            await self._reach("work")
            return await work()

    async def wait_asleep(self, pool: str) -> None:
        await self.turns.over()

    async def wait_for_work(self, pool: str) -> None:
        await self.turns.wanted()

    async def wait_for_backlog(self, pool: str) -> None:
        await self.turns.wanted()

    async def take_turn(self, pool: str) -> None:
        self.number += 1
        await self.turns.take(self._onload, self._offload)

    async def progress(self) -> Progress:
        return Progress(0)


@dataclass
class Colocated:
    run: World
    trainer: Trainer
    hosts: list[Host]
    sharing: GpuTimeSharing
    captures: Disk


def colocated(
    *,
    linger_s: float = 0.0,
    deaths: Sequence[int] = (),
    teachers: Collection[str] = (),
    **sizes: Any,
) -> Colocated:
    """``deaths``: after so many turns of the loop the rollout stage dies, and starts anew.

    ``teachers`` are on the same GPUs too.
    """
    run = world(evaluation=evaluation(prompts=3), **sizes)
    gpu = Gpu()
    hosts = [Host(gpu) for _ in run.students]
    for student, host in zip(run.students, hosts, strict=True):
        gate_student(student, host)
    trainer = Trainer(gpu, hosts, linger_s)
    guard_trainer(run, trainer)
    parts: Any = run.pipeline.stages
    guests: GpuGuests = trainer
    if teachers:
        parts.scorer = on_the_same_gpus(run, teachers, gpu, hosts)
        guests = SeveralGuests(parts.scorer, trainer)
    sharing = GpuTimeSharing(
        "rollout",
        partial(alive, "rollout", hosts),
        guests,
        GpuLock("rollout", trainer.progress, 20),
        sleep_timeout_s=20,
        turn="the trainer's turn",
    )
    gate_sync(run, hosts)
    captures: Any = Disk(run.trainer, slow=False)
    run.pipeline.config = changed(run.pipeline.config, checkpoint={"every": 1})
    run.pipeline.checkpointer = captures
    parts.sync = LockedSync(run.sync, replicas=sharing.lock, trainer=None)
    supervise = parts.supervise
    parts.supervise = lambda *arguments: gather_or_cancel(
        supervise(*arguments), dying(sharing, deaths)
    )
    return Colocated(run, trainer, hosts, sharing, captures)


class Scorer(ScorerStage):
    """A scoring stage in a process of its own: a scoring phase outlives its caller."""

    async def take_turn(self, host: str) -> None:
        await asyncio.shield(asyncio.create_task(super().take_turn(host)))


def on_the_same_gpus(
    run: World, names: Collection[str], gpu: Gpu, hosts: Sequence[Host]
) -> ScorerStage:
    replicas: Any = {
        name: [GuestTeacher(inner, gpu, hosts) if name in names else inner]
        for name, inner in run.teachers.items()
    }
    return Scorer(
        replicas,
        run.queue,
        dict.fromkeys(run.teachers, 8),
        hosts=dict.fromkeys(names, "rollout"),
        backlog_size=run.pipeline.config.train.batch_size,
    )


async def dying(sharing: GpuTimeSharing, deaths: Sequence[int]) -> None:
    for turns in deaths:
        alternating = asyncio.create_task(sharing.endless())
        await settle(turns)
        alternating.cancel()
        await asyncio.wait({alternating})
    await sharing.endless()


def guard_trainer(run: World, trainer: Trainer) -> None:
    """A step is a wait for a batch, which needs no GPU, and then the work; a snapshot is work."""
    take, snapshot = run.trainer.batcher.take, run.sync.snapshot

    async def step_on_gpu(version: int) -> Any:
        taken = await take(version)
        await trainer.work(run.trainer.pace.wait)
        return taken

    async def copied(version: int, again: bool = False) -> None:
        await trainer.work(lambda: snapshot(version, again))

    run.trainer.batcher.take = step_on_gpu  # type: ignore[method-assign]
    run.sync.snapshot = copied  # type: ignore[method-assign]


@pytest.mark.parametrize("teachers", [(), TEACHERS])
async def test_it_trains_every_admitted_sample(teachers: tuple[str, ...]) -> None:
    """Teachers may be on the same GPUs too."""
    made = colocated(teachers=teachers)
    run = await made.run.run()
    assert run.counts["trained"] == 24
    assert len(made.captures.taken) == 3
    assert set(made.trainer.gpu.users) == {"trainer", *(f"teacher {name}/0" for name in teachers)}
    assert [student.version for student in run.students] == [3, 3]


def test_exactly_on_policy_it_trains_nothing_stale_with_one_turn_a_version() -> None:
    made = colocated(s=0.0, k=1, linger_s=0.05)
    run = run_virtually(made.run.run())
    assert set(run.trainer.staleness) == {0}
    assert made.trainer.number == 6


def test_a_version_of_several_steps_is_one_turn_where_its_batches_are_complete() -> None:
    """s = 0: the engines finish all K batches before the trainer has the first one's turn."""
    made = colocated(s=0.0, k=3, linger_s=0.05)
    run_virtually(made.run.run())
    assert made.trainer.number < 6


async def test_an_engine_that_dies_while_it_goes_to_sleep_is_left_out() -> None:
    made = colocated()
    made.hosts[1].dies = True
    made.run.students[1].fail_at = 0
    run = await made.run.run()
    assert run.counts["trained"] == 24


@pytest.mark.parametrize("stage", ["onload", "work", "offload"])
async def test_a_trainer_that_dies_in_its_turn_ends_the_pipeline_as_the_trainers_death(
    stage: str,
) -> None:
    """The engines sleep then; the next rollout stage wakes them when the next trainer is ready."""
    made = colocated()
    made.trainer.dies_at = stage
    with pytest.raises(ProcessDied, match="trainer: its process died"):
        await made.run.run()
    assert made.sharing.lock.locked()
    assert all(host.gate.closed for host in made.hosts)
    made.trainer.gpu.awake.clear()  # the memory of a process that died
    next_trainer = Trainer(made.trainer.gpu, made.hosts, 0.0)
    sharing = GpuTimeSharing(
        "rollout",
        partial(alive, "rollout", made.hosts),
        next_trainer,
        made.sharing.lock,
        sleep_timeout_s=20,
        held=True,
    )
    alternating = asyncio.create_task(sharing.endless())
    await asyncio.wait_for(made.sharing.lock.acquire("a weight sync"), 5)
    assert not any(host.gate.closed for host in made.hosts)
    alternating.cancel()


@examples(60)
@given(
    seed=st.integers(0, 10_000),
    s=st.sampled_from([0.0, 0.5, 1.0, 3.0]),
    k=st.integers(1, 3),
    n=st.integers(1, 3),
    groups=st.integers(1, 4),
    replicas=st.integers(1, 3),
    steps=st.integers(1, 7),
    linger_s=st.sampled_from([0.0, 0.001]),
    deaths=st.lists(st.integers(0, 300), max_size=4),
    dead=st.booleans(),
    teachers=st.sets(st.sampled_from(TEACHERS)),
)
def test_never_both_work_nobody_waits_for_ever_and_every_sample_is_trained_once(
    n: int, groups: int, dead: bool, teachers: set[str], **sizes: Any
) -> None:
    async def scenario() -> Colocated:
        made = colocated(teachers=sorted(teachers), batch_size=n * groups, n=n, **sizes)
        if dead and sizes["replicas"] > 1:
            made.run.students[-1].fail_at = random.Random(sizes["seed"]).randint(0, 5)
        await made.run.run()
        return made

    made = asyncio.run(scenario())
    uids = uids_of(made.run)
    assert len(set(uids)) == len(uids) == sizes["steps"] * n * groups
    assert made.run.counts["in_flight"] == 0
    assert max(made.run.trainer.staleness) == 0 or sizes["s"] > 0
    assert not made.trainer.gpu.awake
