"""Colocated teachers share GPUs with another pool: the whole pipeline on fakes, at random sizes."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from async_opd.core.batch import Batch
from async_opd.core.errors import NoReplica, StageError, StageTimeout
from async_opd.core.reports import Progress, SyncReport
from async_opd.core.samples import Prompt, Rollout
from async_opd.core.stages import SamplingSpec
from async_opd.sharing.time_sharing import GpuLock, GpuTimeSharing
from async_opd.waiting.gate import Gate
from async_opd.waiting.race import gather_or_cancel
from teachers.stage import ScorerStage
from tests.properties import examples
from tests.sharing.locked_sync import LockedSync
from tests.test_pipeline import TEACHERS, FakeStudent, FakeTeacher, World, world


@dataclass
class Gpu:
    """Who uses it. More than one at a time is an error."""

    awake: set[str] = field(default_factory=set)
    users: list[str] = field(default_factory=list)

    def take(self, name: str) -> None:
        assert not self.awake, f"{name} wakes while {self.awake} are"
        self.awake.add(name)
        self.users.append(name)

    def leave(self, name: str) -> None:
        self.awake.remove(name)


class Shared:
    """A host: everything it does goes through a gate, while no colocated teacher is awake."""

    def __init__(self, gpu: Gpu) -> None:
        self.gate = Gate()
        self.gpu = gpu
        self.dead = False
        self.dies = False
        self.hangs = False

    async def idle(self) -> None:
        await self.gate.empty()

    async def progress(self) -> Progress:
        return Progress(0)

    async def sleep(self) -> None:
        if self.hangs:
            await asyncio.Event().wait()
        if self.dies:
            self.dead = True
            raise StageError("student/0", "its process died")
        await self.gate.close()

    async def wake(self) -> None:
        assert not self.gpu.awake, f"the host wakes while {self.gpu.awake} are"
        self.gate.open()


class ColocatedTeacher:
    """A teacher that works only while it has the GPUs."""

    def __init__(self, name: str, inner: FakeTeacher, gpu: Gpu, hosts: Sequence[Shared]) -> None:
        self.name, self.inner, self.gpu, self.hosts = name, inner, gpu, hosts
        self.sizes: list[int] = []
        self.asleep = True
        self.fail_to_wake = 0

    def kill(self) -> None:
        raise AssertionError(f"{self.name} went to sleep, and is ended all the same")

    async def wake(self) -> None:
        if self.fail_to_wake:
            self.fail_to_wake -= 1
            raise StageError(self.name, "out of memory")
        assert not any(host.gate._open.is_set() and not host.dead for host in self.hosts)
        self.gpu.take(self.name)
        self.asleep = False

    async def sleep(self) -> None:
        if not self.asleep:
            self.gpu.leave(self.name)
        self.asleep = True

    async def score(self, batch: Batch) -> Batch:
        assert not self.asleep, f"{self.name} is asked to score in its sleep"
        self.sizes.append(len(batch))
        return await self.inner.score(batch)

    async def generate(self, prompts: Sequence[Prompt], sampling: SamplingSpec) -> list[Rollout]:
        assert not self.asleep
        return []

    async def ready(self) -> int:
        return await self.inner.ready()

    async def report(self) -> Any:
        return await self.inner.report()


@dataclass
class Colocated:
    """A world whose teachers have hosts."""

    run: World
    hosts: dict[str, list[Shared]]
    teachers: dict[str, ColocatedTeacher]
    gpus: dict[str, Gpu]
    sharing: dict[str, GpuTimeSharing]


def colocated(
    placement: Mapping[str, str],
    *,
    backlog_size: int | None = None,
    sleep_timeout_s: float = 20,
    **sizes: Any,
) -> Colocated:
    run = world(**sizes)
    gpus = {name: Gpu() for name in ("rollout", "train")}
    hosts = {
        "rollout": [Shared(gpus["rollout"]) for _ in run.students],
        "train": [Shared(gpus["train"])],
    }
    for student, host in zip(run.students, hosts["rollout"], strict=True):
        student.worker._sample = gated(student, host)
    guard_training(run, hosts["train"][0])
    teachers = {
        name: ColocatedTeacher(f"teacher {name}/0", run.teachers[name], gpus[host], hosts[host])
        for name, host in placement.items()
    }
    replicas: Any = {name: [teachers.get(name, run.teachers[name])] for name in TEACHERS}
    batch_size = run.pipeline.config.train.batch_size
    scorer = ScorerStage(
        replicas,
        run.queue,
        dict.fromkeys(TEACHERS, 8),
        hosts=placement,
        backlog_size=backlog_size or batch_size,
    )
    sharing = {
        name: GpuTimeSharing(
            name,
            partial(alive, name, hosts[name]),
            scorer,
            GpuLock(name, scorer.progress, 20),
            sleep_timeout_s=sleep_timeout_s,
        )
        for name in sorted(set(placement.values()))
    }
    parts: Any = run.pipeline.stages
    parts.scorer, supervise = scorer, parts.supervise
    parts.supervise = lambda *arguments: gather_or_cancel(
        supervise(*arguments), *(each.endless() for each in sharing.values())
    )
    if "rollout" in sharing:
        guard_sync(run, hosts["rollout"])
    guard_snapshots(run, hosts["train"][0])
    locks = {name: each.lock for name, each in sharing.items()}
    parts.sync = LockedSync(run.sync, replicas=locks.get("rollout"), trainer=locks.get("train"))
    return Colocated(run, hosts, teachers, gpus, sharing)


def alive(name: str, hosts: Sequence[Shared]) -> dict[str, Shared]:
    return {f"{name}/{index}": host for index, host in enumerate(hosts) if not host.dead}


def gated(student: FakeStudent, host: Shared) -> Any:
    async def sample(prompt: Prompt, uid: str) -> Rollout:
        async with host.gate:
            assert not host.gpu.awake, f"the student samples while {host.gpu.awake} are awake"
            return await student._sample(prompt, uid)

    return sample


def guard_training(run: World, host: Shared) -> None:
    """A step is a wait for a batch, which needs no GPU, and then the work."""
    take = run.trainer.batcher.take

    async def guarded(version: int) -> Any:
        taken = await take(version)
        async with host.gate:
            assert not host.gpu.awake
            await run.trainer.pace.wait()
        return taken

    run.trainer.batcher.take = guarded  # type: ignore[method-assign]


def guard_snapshots(run: World, host: Shared) -> None:
    """Copies of the weights take memory on the trainer's GPU, and take a while."""
    snapshot = run.sync.snapshot

    async def guarded(version: int, again: bool = False) -> None:
        for _ in range(3):
            assert not host.gpu.awake, f"a snapshot while {host.gpu.awake} are awake"
            await asyncio.sleep(0)
        await snapshot(version, again)

    run.sync.snapshot = guarded  # type: ignore[method-assign]


def guard_sync(run: World, hosts: Sequence[Shared]) -> None:
    push = run.sync.push

    async def guarded() -> SyncReport:
        assert all(host.gate._open.is_set() or host.dead for host in hosts), (
            "weights for a student that sleeps"
        )
        return await push()

    run.sync.push = guarded  # type: ignore[method-assign]


async def done(made: Colocated, seconds: float = 20) -> World:
    await asyncio.wait_for(made.run.pipeline.run(), seconds)
    return made.run


BOTH = {"a": "rollout", "b": "rollout"}


async def test_two_teachers_share_the_students_gpus() -> None:
    made = colocated(BOTH)
    run = await done(made)
    assert run.pipeline.run_state.ledger.counts["trained"] == 24
    assert {teacher.asleep for teacher in made.teachers.values()} == {True}
    assert set(made.gpus["rollout"].users) == {"teacher a/0", "teacher b/0"}


async def test_exactly_on_policy_with_time_sharing_trains_nothing_stale() -> None:
    run = await done(colocated(BOTH, s=0.0, k=1))
    assert set(run.trainer.staleness) == {0}


async def test_a_backlog_is_scored_in_batches_not_one_by_one() -> None:
    made = colocated(BOTH, steps=8, batch_size=16, n=2)
    await done(made)
    for teacher in made.teachers.values():
        assert sum(teacher.sizes) / len(teacher.sizes) > 2


async def test_teachers_share_the_trainers_gpu() -> None:
    made = colocated({"a": "train", "b": "train"})
    run = await done(made)
    assert run.pipeline.run_state.ledger.counts["trained"] == 24
    assert made.gpus["train"].users


async def test_one_teacher_can_be_dedicated_while_another_shares_gpus() -> None:
    run = await done(colocated({"b": "rollout"}))
    assert run.pipeline.run_state.ledger.counts["trained"] == 24


async def test_the_teacher_that_holds_most_wakes_first() -> None:
    made = colocated(BOTH)
    backlog = made.run.pipeline.stages.scorer._backlogs["rollout"]  # type: ignore[attr-defined]
    from async_opd.core.lease import Lease
    from tests.conftest import make_rollout

    for name, count in (("a", 1), ("b", 3)):
        batch = Batch.pack(make_rollout(f"{name}{i}/0") for i in range(count))
        await backlog.hold(name, Lease(0, (batch,)))
    assert backlog.next_teacher == "b"


async def test_a_request_to_a_sleeping_teacher_wakes_it() -> None:
    made = colocated(BOTH)
    scorer = made.run.pipeline.stages.scorer
    works = (scorer.run(), *(each.endless() for each in made.sharing.values()))
    work = asyncio.create_task(gather_or_cancel(*works))
    sampling = SamplingSpec(max_tokens=4, temperature=0.0, top_p=1.0, n=1)
    assert await asyncio.wait_for(scorer.generate("a", [], sampling), 5) == []
    assert made.gpus["rollout"].users == ["teacher a/0"]
    work.cancel()


async def test_a_teacher_that_does_not_wake_is_recovered_in_its_scoring_phase() -> None:
    made = colocated(BOTH)
    made.teachers["a"].fail_to_wake = 1
    wake = made.teachers["a"].wake

    async def ready() -> int:
        await wake()
        return 1

    made.teachers["a"].ready = ready  # type: ignore[method-assign]
    run = await done(made)
    assert run.pipeline.run_state.ledger.counts["trained"] == 24


async def test_a_teacher_that_never_works_again_ends_the_run() -> None:
    made = colocated(BOTH)
    made.run.teachers["a"].fail = True
    with pytest.raises(NoReplica, match="teacher a"):
        await done(made)


async def test_a_host_that_does_not_come_to_rest_ends_the_run_in_time() -> None:
    made = colocated(BOTH, sleep_timeout_s=0.2)
    made.hosts["rollout"][0].hangs = True
    with pytest.raises(StageTimeout, match=r"could not sleep: .* no new token for 0\.2 s"):
        await done(made)


@pytest.mark.parametrize("when", ["dead", "dies"])
async def test_a_host_that_dies_before_or_while_it_comes_to_rest_is_left_out(when: str) -> None:
    made = colocated(BOTH)
    setattr(made.hosts["rollout"][1], when, True)
    made.run.students[1].fail_at = 0
    run = await done(made)
    assert run.pipeline.run_state.ledger.counts["trained"] == 24


@examples(120)
@given(
    seed=st.integers(0, 10_000),
    hosts=st.tuples(*[st.sampled_from(["rollout", "train", None])] * 2),
    s=st.sampled_from([0.0, 0.5, 1.0, 3.0]),
    k=st.integers(1, 3),
    n=st.integers(1, 3),
    groups=st.integers(1, 4),
    replicas=st.integers(1, 3),
    steps=st.integers(1, 7),
    backlog_size=st.one_of(st.none(), st.integers(1, 30)),
)
def test_it_never_dead_locks_and_trains_every_sample_once(
    seed: int,
    hosts: tuple[str | None, str | None],
    s: float,
    k: int,
    n: int,
    groups: int,
    replicas: int,
    steps: int,
    backlog_size: int | None,
) -> None:
    placement = {name: host for name, host in zip(TEACHERS, hosts, strict=True) if host}
    size = n * groups

    async def scenario() -> World:
        made = colocated(
            placement,
            backlog_size=backlog_size,
            seed=seed,
            s=s,
            k=k,
            n=n,
            batch_size=size,
            replicas=replicas,
            steps=steps,
        )
        return await done(made)

    run = asyncio.run(scenario())
    uids = [uid for uid, _ in run.trainer.trained]
    assert len(set(uids)) == len(uids) == steps * size
    assert run.pipeline.run_state.ledger.counts["in_flight"] == 0
