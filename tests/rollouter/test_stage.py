"""The pool of replicas on fakes: who dies or hangs leaves, is rebuilt, and is never waited for."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from async_opd.config.sections.reliability import SupervisionConfig
from async_opd.core.errors import RolloutFault, StageError
from async_opd.core.reports import Progress
from async_opd.core.samples import Prompt, Rollout
from async_opd.core.stages import SamplingSpec
from async_opd.processes.events import State
from rollouter.stage import RollouterStage
from tests.conftest import make_prompt
from tests.world.clock import ManualTimer, settle
from tests.world.places import FakePlaces
from tests.world.students import FakeReplica

GREEDY = SamplingSpec(4, 0.0, 1.0, 1)


class World:
    """A pool of ``count`` replicas whose rebuilding can be made to fail."""

    def __init__(
        self,
        count: int,
        tries: int = 3,
        current: asyncio.Event | None = None,
        places: FakePlaces | None = None,
    ) -> None:
        self.clock = ManualTimer()
        self.replicas = {f"student/{i}": FakeReplica(f"student/{i}") for i in range(count)}
        self.broken: set[str] = set()  # cannot be rebuilt
        self.attempts: list[str] = []
        self.released: list[str] = []
        self.lines: list[str] = []
        queue: Any = self
        self.sync = asyncio.Event()  # is over
        self.sync.set()
        self.stage = RollouterStage(
            {**self.replicas},
            queue,
            self.rebuild,
            SupervisionConfig(max_restarts=tries, delay_s=2, timeout_s=60),
            timer=self.clock,
            current=current,
            places=places,
            quiet=self.sync.wait,
        )
        self.stage.members.listen(lambda event: self.lines.append(str(event)))
        self.running = asyncio.create_task(self.stage.run())

    def passes_hours(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Between any two deaths."""
        hours = itertools.count(0.0, 3600.0)
        for restarts in self.stage.members._restarts.values():
            monkeypatch.setattr(restarts, "_clock", hours.__next__)

    async def dies(self, name: str = "student/0") -> None:
        await settle()
        self.replicas[name].die()
        await settle()

    async def release(self, topic: str, consumer: str) -> int:
        self.released.append(consumer)
        return 0

    async def rebuild(self, member: Any) -> Any:
        name = member.name
        self.attempts.append(name)
        if name in self.broken:
            raise StageError(name, "out of memory")
        self.replicas[name] = FakeReplica(name, member.value.life + 1)
        return self.replicas[name]


@pytest.mark.parametrize("count", [1, 2])
async def test_a_dead_replica_gives_back_its_leases_and_is_rebuilt(count: int) -> None:
    world = World(count)
    await world.dies()
    assert world.released == ["student/0#0"]
    assert world.lines[0] == "student/0 is ejected: student/0: its process died"
    assert world.replicas["student/0"].consumer == "student/0#1"
    assert ("run", 1) in world.replicas["student/0"].calls


async def test_a_replica_whose_node_drains_stops_and_its_prompts_go_back_at_once() -> None:
    places = FakePlaces(0, 1)
    world = World(2, tries=0, places=places)
    await settle()
    places.words = {1: "machine-c drains"}
    places.there.discard(1)
    await world.clock.passes(2)
    assert world.released == ["student/1#0"]
    assert world.replicas["student/1"].events == ["stop"]
    assert (await world.stage.report()).gauges["replicas"] == 1
    places.words = {}
    places.give(1)
    await settle()
    assert ("run", 1) in world.replicas["student/1"].calls


@pytest.mark.parametrize("hangs", [False, True])
async def test_a_replica_whose_node_drains_leaves_after_a_weight_sync_or_its_bound(
    hangs: bool,
) -> None:
    places = FakePlaces(0, 1)
    world = World(2, tries=0, places=places)
    await settle()
    world.sync.clear()
    places.words = {1: "machine-c drains"}
    places.there.discard(1)
    await world.clock.passes(2)
    assert world.released == ["student/1#0"]
    assert world.stage.members.all[1].state is State.EJECTED
    if hangs:
        await world.clock.passes(60)
    world.sync.set()
    await settle()
    assert world.stage.members.all[1].state is State.ABSENT


async def test_deaths_of_one_that_served_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(2, tries=2)
    world.passes_hours(monkeypatch)
    for _ in range(6):
        await world.dies()
        await world.clock.passes(6)
        world.replicas["student/0"].counters = {"tokens": 8.0}
        await world.stage.report()
    assert world.replicas["student/0"].life == 6


async def test_one_that_is_gone_for_good_does_not_end_the_others() -> None:
    world = World(2, tries=1)
    world.broken = {"student/0"}
    await world.dies()
    assert not world.running.done()
    assert world.lines[-1].startswith("student/0 is gone for good: student/0: ")


async def test_an_evaluation_asks_another_one_for_what_a_dead_one_did_not_answer() -> None:
    world = World(2, tries=0)
    await settle()
    world.replicas["student/0"].hangs = True
    prompts = [make_prompt(f"p{index}") for index in range(5)]
    answers = asyncio.create_task(world.stage.generate(prompts, GREEDY))
    await settle()
    world.replicas["student/0"].die()
    assert [r.uid for r in await answers] == [f"p{index}/0" for index in range(5)]


async def test_an_evaluation_waits_for_the_only_replica_to_be_rebuilt() -> None:
    world = World(1)
    await world.dies()
    (answer,) = await world.stage.generate([make_prompt("p")], GREEDY)
    assert answer.version_spans[0].version == 1


async def test_after_a_refused_prompt_an_evaluation_ejects_no_replica_that_fails_later() -> None:
    world = World(2)
    await settle()
    refusing, slow = world.replicas.values()
    late = asyncio.Event()

    async def refuse(prompts: Sequence[Prompt], sampling: SamplingSpec) -> list[Rollout]:
        raise RolloutFault("student", "the engine refuses p0/0")

    async def fail_late(prompts: Sequence[Prompt], sampling: SamplingSpec) -> list[Rollout]:
        await late.wait()
        raise StageError("student/1", "a call failed")

    refusing.generate, slow.generate = refuse, fail_late
    with pytest.raises(RolloutFault, match="refuses p0/0"):
        await world.stage.generate([make_prompt("p0"), make_prompt("p1")], GREEDY)
    late.set()
    await settle()
    assert (world.lines, world.attempts) == ([], [])


async def test_the_report_counts_rebuilds_and_who_serves() -> None:
    world = World(2)
    await world.dies()
    gauges = (await world.stage.report()).gauges
    assert (gauges["rebuilds"], gauges["replicas"]) == (1, 2)


async def test_the_pool_waits_until_all_have_the_newest_weights() -> None:
    current = asyncio.Event()
    world = World(2, current=current)
    for replica in world.replicas.values():
        replica.waits_for = "prompts (admission)"
    await settle()
    assert (await world.stage.report()).waits_for == "the newest weights"
    current.set()
    assert (await world.stage.report()).waits_for == "prompts (admission)"


async def test_progress_counts_the_tokens_of_all_replicas_and_of_those_before_them() -> None:
    world = World(2)
    await settle()
    for replica in world.replicas.values():
        replica.tokens = 10
    assert await world.stage.progress() == Progress(20, 2000)
    world.replicas["student/0"].die()
    await settle()
    world.replicas["student/0"].tokens = 4
    assert await world.stage.progress() == Progress(24, 2000)


@given(deaths=st.lists(st.tuples(st.integers(0, 2), st.booleans(), st.booleans()), max_size=12))
def test_whoever_dies_or_hangs_everybody_serves_in_the_end_and_gave_everything_back(
    deaths: list[tuple[int, bool, bool]],
) -> None:
    async def body() -> None:
        world = World(3, tries=12)
        await settle()
        for index, hangs, both in deaths:
            for number in {index, (index + both) % 3}:
                replica = world.replicas[f"student/{number}"]
                if hangs:
                    replica.hangs = True
                else:
                    replica.die()
            await settle()
        for _ in range(40):
            await world.clock.passes(100)
        assert [member.state for member in world.stage.members.all] == [State.SERVING] * 3
        lives = {f"{r.name}#{life}" for r in world.replicas.values() for life in range(r.life)}
        assert set(world.released) == lives
        world.running.cancel()

    asyncio.run(body())
