"""A teacher's pool on fakes: failover, probes, rebuilds, dead letters. Time passes when told to."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from async_opd.config.sections.reliability import SupervisionConfig
from async_opd.config.sections.teachers import HealthConfig
from async_opd.core.batch import Batch
from async_opd.core.errors import Displaced, RolloutFault, StageError
from async_opd.core.samples import Prompt, Rollout, Sample
from async_opd.core.scores import SampledLogprobs
from async_opd.core.stages import SamplingSpec
from async_opd.processes.events import State
from async_opd.queue.sizes import EpisodeBounds
from teachers.pool import ScoreResult, TeacherPool
from teachers.replica_slots import ReplicaSlots, TeacherWeights
from tests.conftest import make_prompt, make_rollout
from tests.properties import examples
from tests.world.clock import ManualTimer, settle
from tests.world.places import FakePlaces
from tests.world.teachers import FakeRebuild, FakeTeacher, samples

SAMPLING = SamplingSpec(max_tokens=4, temperature=0.0, top_p=1.0, n=1)


def rollouts(*uids: str, tokens: int = 4) -> Batch:
    return Batch.pack(make_rollout(uid, tokens=tokens) for uid in uids)


def uids(scored: ScoreResult) -> list[str]:
    return [header.uid for batch in scored.samples for header in batch.headers]


@asynccontextmanager
async def pool(
    *replicas: FakeTeacher,
    rebuild: FakeRebuild | None = None,
    episodes: EpisodeBounds | None = None,
    **health: Any,
) -> AsyncIterator[tuple[TeacherPool, ManualTimer]]:
    clock = ManualTimer()
    names = set(health) & set(SupervisionConfig.model_fields) - {"timeout_s"}
    supervision = SupervisionConfig(**{name: health.pop(name) for name in names})
    slots = ReplicaSlots("t", replicas, HealthConfig(**health), rebuild, supervision, timer=clock)

    made = TeacherPool(slots, episodes)
    running = asyncio.create_task(slots.members.run())
    try:
        yield made, clock
    finally:
        running.cancel()
        await asyncio.wait({running})


@pytest.mark.parametrize("tokens", [4, 0])
async def test_a_batch_comes_back_as_samples_in_order(tokens: int) -> None:
    asked = ["p/0", "p/1", "q/0"]
    async with pool(FakeTeacher()) as (teacher, _):
        assert uids(await teacher.score(rollouts(*asked, tokens=tokens))) == asked


async def test_an_empty_batch_is_nothing_to_do() -> None:
    async with pool(FakeTeacher(dead=True)) as (teacher, _):
        assert await teacher.score(rollouts()) == ScoreResult()


async def on_probation(teacher: TeacherPool, bad: FakeTeacher) -> None:
    """Both of two replicas have scored; then one of them fails, and is not taken back yet."""
    for index in range(2):
        await teacher.score(rollouts(f"p{index}/0"))
    bad.broken = True
    await teacher.score(rollouts("q/0"))
    await settle()


async def test_a_replica_that_fails_fast_does_not_attract_all_work() -> None:
    bad, good = FakeTeacher(broken=True), FakeTeacher()
    async with pool(bad, good) as (teacher, _):
        await teacher.score(rollouts("p/0"))
        await settle()
        tried = len(bad.scored)
        for index in range(20):
            await teacher.score(rollouts(f"q{index}/0"))
        assert len(bad.scored) == tried


async def test_a_replica_that_failed_serves_again_once_it_scores_what_was_scored_before() -> None:
    bad, good = FakeTeacher(), FakeTeacher()
    async with pool(bad, good, delay_s=1) as (teacher, clock):
        await on_probation(teacher, bad)
        serving = [len(teacher.slots.members.serving)]
        bad.broken = False
        await clock.passes(1)
        assert [*serving, len(teacher.slots.members.serving)] == [1, 2]


async def test_a_rollout_whose_image_is_gone_is_lost_alone_and_at_once() -> None:
    replica = FakeTeacher(imageless=frozenset({"q/0"}))
    async with pool(replica) as (teacher, _):
        scored = await teacher.score(rollouts("p/0", "q/0", "r/0"))
        assert uids(scored) == ["p/0", "r/0"]
        assert [letter.reason for letter in scored.lost] == ["its image is not held"]
        assert replica.scored.count(("q/0",)) == 1
        assert len(teacher.slots.members.serving) == 1


async def test_a_replica_whose_probe_lacks_its_image_by_now_serves_again() -> None:
    bad, good = FakeTeacher(), FakeTeacher()
    async with pool(bad, good, delay_s=1) as (teacher, clock):
        await on_probation(teacher, bad)
        bad.broken, bad.imageless = False, frozenset({"p0/0", "p1/0", "q/0"})
        await clock.passes(1)
        assert len(teacher.slots.members.serving) == 2


async def test_a_hanging_replica_times_out_by_its_tokens() -> None:
    hanging, good = FakeTeacher(hangs=True), FakeTeacher()
    async with pool(hanging, good, timeout_s=5, min_tokens_per_s=10) as (teacher, clock):
        work = asyncio.create_task(
            teacher.score(rollouts("p/0", tokens=97))
        )  # with its prompt, 100
        await settle()
        assert clock.left == [5 + 100 / 10]
        await clock.passes(15)
        assert uids(await asyncio.wait_for(work, 5)) == ["p/0"]


async def test_a_teachers_own_episodes_have_the_time_of_their_tokens_and_environments() -> None:
    bounds = EpisodeBounds(tokens=997, seconds=600, concurrency=3)
    hanging = FakeTeacher(hangs=True)
    given: Any = {"episodes": bounds, "timeout_s": 5, "min_tokens_per_s": 10}
    async with pool(hanging, **given) as (teacher, clock):
        prompts = [make_prompt("p"), make_prompt("q")]
        asked = asyncio.create_task(teacher.generate(prompts, SAMPLING))
        await settle()
        tokens = sum(len(prompt.token_ids) + 997 for prompt in prompts)
        assert clock.left == [5 + tokens / 10 + 2 * 600]
        asked.cancel()


async def test_one_long_answer_of_a_teacher_has_the_time_that_its_tokens_take_one_by_one() -> None:
    sampling = SamplingSpec(max_tokens=1000, temperature=0.0, top_p=1.0, n=1)
    async with pool(FakeTeacher(hangs=True), timeout_s=5, min_tokens_per_s=80) as (teacher, clock):
        asked = asyncio.create_task(teacher.generate([make_prompt("p")], sampling))
        await settle()
        assert clock.left == [5 + 1000 / 2]
        asked.cancel()


async def test_new_weights_wait_for_the_tokens_that_a_replica_has() -> None:
    busy = FakeTeacher()
    async with pool(busy, min_tokens_per_s=10) as (teacher, clock):
        busy.hangs = True
        work = asyncio.create_task(teacher.score(rollouts("p/0", tokens=97)))
        await settle()
        loading = asyncio.create_task(teacher.slots.load(NEW))
        await settle()
        assert clock.left[-1] == NEW.timeout_s + 100 / 10
        work.cancel()
        loading.cancel()


def others(batch: Batch) -> Batch:
    return samples(Batch.pack(make_rollout(f"x{index}/0") for index in range(len(batch))))


def too_few(batch: Batch) -> Batch:
    return samples(batch.split(1)[0])


def cut_off(batch: Batch) -> Batch:
    whole = samples(batch)
    return Batch(whole.rows, whole.buffer[:-1])


def short_arrays(batch: Batch) -> Batch:
    found = [Sample(item, SampledLogprobs(item.rollout_logprobs)) for item in batch.unpack()]
    for sample in found:
        object.__setattr__(sample, "scores", SampledLogprobs(np.zeros(1, np.float32)))
    return Batch.pack(found)


@pytest.mark.parametrize("garbage", [others, too_few, cut_off, short_arrays, lambda batch: batch])
async def test_garbage_counts_as_a_failure(garbage: Callable[[Batch], Batch]) -> None:
    bad, good = FakeTeacher(answer=garbage), FakeTeacher()
    async with pool(bad, good) as (teacher, _):
        assert uids(await teacher.score(rollouts("p/0", "p/1"))) == ["p/0", "p/1"]
        report = await teacher.report()
        assert (report.gauges["failures"], len(good.scored)) == (1, 1)


async def test_a_rollout_that_no_replica_can_score_is_lost_alone_and_with_its_reason() -> None:
    replicas = [FakeTeacher(poison=frozenset({"p/1"})) for _ in range(2)]
    async with pool(*replicas) as (teacher, _):
        scored = await asyncio.wait_for(teacher.score(rollouts("p/0", "p/1", "p/2")), 5)
    assert uids(scored) == ["p/0", "p/2"]
    (lost,) = scored.lost
    assert lost.header.uid == "p/1"
    assert lost.reason == "no replica could score it in 4 tries: r: cannot score"


@pytest.mark.parametrize(("batch", "tries"), [(("p/0", "p/1"), 6), (("p/1",), 4)])
async def test_a_rollout_is_tried_as_configured(batch: tuple[str, ...], tries: int) -> None:
    replica = FakeTeacher(poison=frozenset({"p/1"}))
    async with pool(replica, tries=tries) as (teacher, _):
        scored = await asyncio.wait_for(teacher.score(rollouts(*batch)), 5)
    assert (len(scored.lost), sum("p/1" in uids for uids in replica.scored)) == (1, tries)


async def test_the_teachers_own_answers_come_from_a_replica_that_works() -> None:
    async with pool(FakeTeacher(dead=True), FakeTeacher()) as (teacher, _):
        (answer,) = await teacher.generate([make_prompt("p")], SAMPLING)
        assert answer.uid == "p/0"


async def test_a_prompt_that_no_replica_can_answer_ejects_none_of_them() -> None:
    fakes = [FakeTeacher(imageless=frozenset({"p"})) for _ in range(2)]
    async with pool(*fakes) as (teacher, _):
        with pytest.raises(RolloutFault, match="its image is not held"):
            await teacher.generate([make_prompt("p")], SAMPLING)
        assert teacher.slots.members.failures == 0


class Endless(FakeTeacher):
    """Answers nothing but an error for prompt ``q``; ``cancelled`` counts the calls that ended."""

    cancelled = 0

    async def generate(self, prompts: Sequence[Prompt], sampling: SamplingSpec) -> list[Rollout]:
        if prompts[0].uid == "q":
            raise StageError(self.name, "cannot generate")
        try:
            return await asyncio.get_running_loop().create_future()
        finally:
            self.cancelled += 1


async def test_an_answer_that_cannot_be_had_ends_the_other_calls_for_answers() -> None:
    fakes = [Endless() for _ in range(4)]
    async with pool(*fakes, tries=2) as (teacher, _):
        long = SamplingSpec(max_tokens=1 << 23, temperature=0.0, top_p=1.0, n=1)
        with pytest.raises(StageError, match="cannot generate"):
            await teacher.generate([make_prompt("p"), make_prompt("q")], long)
        assert sum(fake.cancelled for fake in fakes) == 1


async def test_a_report_has_health_latency_and_agreement() -> None:
    async with pool(FakeTeacher(), FakeTeacher(dead=True)) as (teacher, _):
        for index in range(3):
            await teacher.score(rollouts(f"p{index}/0"))
        await settle()
        gauges = (await teacher.report()).gauges
        assert gauges["agreement"] == -0.5
        assert (gauges["serving"], gauges["failures"], gauges["retries"]) == (1, 1, 1)
        assert 0 <= gauges["latency_p50_s"] <= gauges["latency_p99_s"]
        assert (gauges["outstanding_tokens"], gauges["waiting"]) == (0, 0)


async def test_a_report_notices_a_replica_that_died_without_work() -> None:
    rebuild = FakeRebuild()
    async with pool(FakeTeacher(dead=True), rebuild=rebuild) as (teacher, _):
        await teacher.report()
        await settle()
        assert (rebuild.asked, len(teacher.slots.members.serving)) == ([0], 1)


async def test_a_report_does_not_wait_for_a_replica_that_hangs() -> None:
    async with pool(FakeTeacher(hangs=True), FakeTeacher()) as (teacher, clock):
        report = asyncio.create_task(teacher.report())
        await settle()
        await clock.passes(10)
        assert (await asyncio.wait_for(report, 5)).counters["tokens"] == 7


@examples(60)
@given(
    st.lists(st.sampled_from(["fine", "broken", "dead"]), min_size=1, max_size=4),
    st.lists(st.integers(1, 5), min_size=1, max_size=12),
    st.sets(st.integers(0, 11), max_size=4),
)
def test_whatever_fails_every_rollout_is_scored_once_or_lost_once(
    states: list[str], sizes: list[int], bad: set[int]
) -> None:
    """Rollout ``b<i>/0`` of a bad batch i cannot be scored by anybody."""
    poison = frozenset(f"b{index}/0" for index in bad if index < len(sizes))

    async def run() -> None:
        fakes = [
            FakeTeacher(broken=s == "broken", dead=s == "dead", poison=poison)
            for s in (*states, "fine")
        ]
        async with pool(*fakes, rebuild=FakeRebuild(), delay_s=0.001) as (teacher, clock):
            batches = [
                rollouts(*(f"b{i}/{j}" for j in range(size))) for i, size in enumerate(sizes)
            ]
            work = asyncio.gather(*(teacher.score(batch) for batch in batches))
            for _ in range(100):
                if work.done():
                    break
                await clock.passes(1)
            done = await asyncio.wait_for(work, 5)
            scored = [uid for each in done for uid in uids(each)]
            lost = [one.header.uid for each in done for one in each.lost]
            wanted = [header.uid for batch in batches for header in batch.headers]
            assert sorted(scored + lost) == sorted(wanted)
            assert set(lost) <= set(wanted)
            if set(states) == {"fine"}:
                assert poison == set(lost)
            assert sum(teacher.balancer.outstanding_tokens) == 0

    asyncio.run(run())


async def test_rollouts_of_a_group_go_where_its_prompt_was_prefilled() -> None:
    both = FakeTeacher(), FakeTeacher()
    async with pool(*both) as (teacher, _):
        for uid in ("p/0", "q/0", "q/1", "p/1", "q/2"):
            await teacher.score(rollouts(uid))
    assert [fake.scored for fake in both] == [[("p/0",), ("p/1",)], [("q/0",), ("q/1",), ("q/2",)]]


# ── new weights ────────────────────────────────────────────────────────────────────────────────


NEW = TeacherWeights(4, "/copies/version_4", 50.0)


async def test_all_replicas_take_new_weights_and_the_report_says_which() -> None:
    both = FakeTeacher(), FakeTeacher()
    async with pool(*both) as (teacher, _):
        await teacher.slots.load(NEW)
        assert [fake.loaded for fake in both] == [[NEW.directory]] * 2
        assert (await teacher.report()).gauges["version"] == 4


@pytest.mark.parametrize("fault", ["refuses", "hangs"])
async def test_a_replica_that_does_not_take_them_is_rebuilt_with_them(fault: str) -> None:
    bad, good, rebuild = FakeTeacher(), FakeTeacher(), FakeRebuild()
    async with pool(bad, good, rebuild=rebuild) as (teacher, clock):
        setattr(bad, fault, True)
        loading = asyncio.create_task(teacher.slots.load(NEW))
        await settle()
        await clock.passes(50)
        await loading
        await settle()
        assert rebuild.asked == [0]
        assert rebuild.made[0].loaded == [NEW.directory]
        assert len(teacher.slots.members.serving) == 2


async def test_a_replica_on_probation_is_not_taken_back_with_old_weights() -> None:
    bad, good, rebuild = FakeTeacher(), FakeTeacher(), FakeRebuild()
    async with pool(bad, good, rebuild=rebuild, delay_s=1) as (teacher, clock):
        await on_probation(teacher, bad)
        bad.broken = False
        await teacher.slots.load(NEW)
        await clock.passes(1)
        assert bad.loaded == []
        assert [fake.loaded for fake in rebuild.made] == [[NEW.directory]]


async def test_a_replica_that_is_rebuilt_later_takes_the_newest_weights() -> None:
    only, rebuild = FakeTeacher(), FakeRebuild()
    async with pool(only, rebuild=rebuild) as (teacher, _):
        await teacher.slots.load(NEW)
        only.dead = True
        assert uids(await teacher.score(rollouts("p/0"))) == ["p/0"]
        assert rebuild.made[0].loaded == [NEW.directory]


async def test_a_turn_ends_although_a_replica_has_lost_its_place_and_later_it_is_there_again() -> (
    None
):
    rebuild, places = FakeRebuild(), FakePlaces(1)
    rebuild.displacement, rebuild.cluster = Displaced("t/0", "machine-b is lost"), places
    lost, other = FakeTeacher(), FakeTeacher()
    async with pool(lost, other, rebuild=rebuild) as (teacher, _):
        for turn in range(2):
            lost.dead, lost.awake = True, False
            await teacher.slots.wake()
            assert uids(await teacher.score(rollouts(f"p{turn}/0"))) == [f"p{turn}/0"]
            await asyncio.wait_for(teacher.slots.sleep(), 5)
            assert teacher.slots.members.all[0].state is State.ABSENT
        places.give(0)
        await settle()
        assert rebuild.made == []  # the hosts have the GPUs
        await teacher.slots.wake()
        await asyncio.wait_for(teacher.slots.sleep(), 5)
        assert [made.awake for made in (*rebuild.made, other)] == [False, False]
        assert len(teacher.slots.members.serving) == 2


async def test_a_replica_whose_node_drains_finishes_its_call_and_takes_none() -> None:
    places, rebuild = FakePlaces(0, 1), FakeRebuild()
    rebuild.cluster = places
    gate = asyncio.Event()
    busy, other = FakeTeacher(gate=gate), FakeTeacher()
    async with pool(busy, other, rebuild=rebuild) as (teacher, clock):
        scoring = asyncio.create_task(teacher.score(rollouts("p/0")))
        await settle()
        places.words = {0: "machine-c drains"}
        places.there.discard(0)
        await clock.passes(2)
        assert [member.name for member in teacher.slots.members.serving] == ["teacher t/1"]
        for index in range(3):
            await teacher.score(rollouts(f"q{index}/0"))
        assert len(other.scored) == 3
        assert teacher.slots.members.all[0].state is State.EJECTED  # it still has its call
        gate.set()
        assert uids(await scoring) == ["p/0"]
        await settle()
        assert teacher.slots.members.all[0].state is State.ABSENT
        assert teacher.slots.replicas == [busy, other]  # another stage can end its process
        gauges = (await teacher.report()).gauges
        assert (gauges["failures"], gauges["retries"]) == (0, 0)
        places.words = {}
        places.give(0)
        await settle()
        assert teacher.slots.replicas == [rebuild.made[0], other]
