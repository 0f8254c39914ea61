"""Colocated teachers share GPUs with another pool: the whole pipeline on fakes, at random sizes."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from async_opd.core.batch import Batch
from async_opd.core.errors import NoReplica, StageTimeout
from async_opd.core.stages import Lease, SamplingSpec
from async_opd.sharing.backlog import ScoreBacklog
from async_opd.sharing.time_sharing import GpuLock, GpuTimeSharing
from async_opd.waiting.deadline import gather_or_cancel
from teachers.stage import ScorerStage
from tests.conftest import make_rollout
from tests.properties import examples
from tests.world.clock import settle
from tests.world.gpus import Gpu, GuestTeacher, Host, alive, gate_student, gate_sync, uids_of
from tests.world.prompts import TEACHERS
from tests.world.run import World, world
from tests.world.sync import LockedSync


@dataclass
class Colocated:
    """A world whose teachers have hosts."""

    run: World
    hosts: dict[str, list[Host]]
    teachers: dict[str, GuestTeacher]
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
        "rollout": [Host(gpus["rollout"]) for _ in run.students],
        "train": [Host(gpus["train"])],
    }
    for student, host in zip(run.students, hosts["rollout"], strict=True):
        gate_student(student, host)
    guard_training(run, hosts["train"][0])
    teachers = {
        name: GuestTeacher(run.teachers[name], gpus[host], hosts[host])
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
        gate_sync(run, hosts["rollout"])
    guard_snapshots(run, hosts["train"][0])
    locks = {name: each.lock for name, each in sharing.items()}
    parts.sync = LockedSync(run.sync, replicas=locks.get("rollout"), trainer=locks.get("train"))
    return Colocated(run, hosts, teachers, gpus, sharing)


def guard_training(run: World, host: Host) -> None:
    """A step is a wait for a batch, which needs no GPU, and then the work."""
    take = run.trainer.batcher.take

    async def guarded(version: int) -> Any:
        taken = await take(version)
        async with host.gate:
            assert not host.gpu.awake
            await run.trainer.pace.wait()
        return taken

    run.trainer.batcher.take = guarded  # type: ignore[method-assign]


def guard_snapshots(run: World, host: Host) -> None:
    """Copies of the weights take memory on the trainer's GPU, and take a while."""
    snapshot = run.sync.snapshot

    async def guarded(version: int, again: bool = False) -> None:
        for _ in range(3):
            assert not host.gpu.awake, f"a snapshot while {host.gpu.awake} are awake"
            await settle(1)
        await snapshot(version, again)

    run.sync.snapshot = guarded  # type: ignore[method-assign]


BOTH = {"a": "rollout", "b": "rollout"}


@pytest.mark.parametrize("placement", [BOTH, {"a": "train", "b": "train"}, {"b": "rollout"}])
async def test_teachers_score_all_on_the_gpus_of_their_hosts_in_turns(
    placement: dict[str, str],
) -> None:
    """One teacher can have its GPUs for itself while another shares some."""
    made = colocated(placement)
    run = await made.run.run()
    assert run.counts["trained"] == 24
    assert all(teacher.asleep for teacher in made.teachers.values())
    users = {name for gpu in made.gpus.values() for name in gpu.users}
    assert users == {f"teacher {name}/0" for name in placement}


async def test_exactly_on_policy_with_time_sharing_trains_nothing_stale() -> None:
    run = await colocated(BOTH, s=0.0, k=1).run.run()
    assert set(run.trainer.staleness) == {0}


async def test_a_backlog_is_scored_in_batches_not_one_by_one() -> None:
    made = colocated(BOTH, steps=8, batch_size=16, n=2)
    await made.run.run()
    for teacher in made.teachers.values():
        assert sum(teacher.sizes) / len(teacher.sizes) > 2


async def test_the_teacher_that_holds_most_wakes_first() -> None:
    backlog = ScoreBacklog(TEACHERS, 8)
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
    run = await made.run.run()
    assert run.counts["trained"] == 24


async def test_a_teacher_that_never_works_again_ends_the_run() -> None:
    made = colocated(BOTH)
    made.run.teachers["a"].dead = True
    with pytest.raises(NoReplica, match="teacher a"):
        await made.run.run()


async def test_a_host_that_does_not_come_to_rest_ends_the_run_in_time() -> None:
    made = colocated(BOTH, sleep_timeout_s=0.2)
    made.hosts["rollout"][0].hangs = True
    with pytest.raises(StageTimeout, match=r"could not sleep: .* no new token for 0\.2 s"):
        await made.run.run()


@pytest.mark.parametrize("when", ["dead", "dies"])
async def test_a_host_that_dies_before_or_while_it_comes_to_rest_is_left_out(when: str) -> None:
    made = colocated(BOTH)
    setattr(made.hosts["rollout"][1], when, True)
    made.run.students[1].fail_at = 0
    run = await made.run.run()
    assert run.counts["trained"] == 24


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
    hosts: tuple[str | None, str | None],
    n: int,
    groups: int,
    backlog_size: int | None,
    **sizes: Any,
) -> None:
    placement = {name: host for name, host in zip(TEACHERS, hosts, strict=True) if host}

    async def scenario() -> World:
        made = colocated(placement, backlog_size=backlog_size, batch_size=n * groups, n=n, **sizes)
        return await made.run.run()

    run = asyncio.run(scenario())
    uids = uids_of(run)
    assert len(set(uids)) == len(uids) == sizes["steps"] * n * groups
    assert run.counts["in_flight"] == 0
