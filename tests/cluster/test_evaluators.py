"""Replicas of their own for evaluation: one version an evaluation, no part in other syncs."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from async_opd.cluster.rollouter_actor import StartedReplica
from async_opd.core.reports import Interval
from async_opd.core.samples import Prompt, Rollout
from tests.cluster import test_rollouter_actor as stages
from tests.world.clock import settle
from tests.world.students import FakeReplica

ASKED = [Prompt(uid, "t", "t", stages.PROMPTS[0].token_ids) for uid in ("p", "q", "r", "s")]


def answering(name: str, goes_on: bool = False) -> FakeReplica:
    """It answers when it goes on, with the version that it had when it was asked."""
    made = FakeReplica(name, holds=("generate",))
    made.counters, made.busy = {"tokens": 8.0}, (Interval("generate", 1.0, 4.0, name),)
    if goes_on:
        made.goes_on.set()
    return made


class World(stages.World):
    """Two students, and two that only evaluate: members 2 and 3 for the driver."""

    def __init__(self) -> None:
        self.evaluators = [answering("eval/0"), answering("eval/1")]
        students = [FakeReplica("student/0"), FakeReplica("student/1")]
        super().__init__(*students, *self.evaluators)

    async def synced(self, version: int) -> None:
        await self.service.snapshot(version)
        await self.service.push()

    @property
    def versions(self) -> list[int]:
        return [student.version for student in self.students]


@pytest.fixture
async def world(monkeypatch: pytest.MonkeyPatch) -> Any:
    two = {"every": 1, "replicas": 2}
    monkeypatch.setattr(
        stages, "run_config", lambda host="": stages.config(stages.Path("run"), eval=two)
    )
    made = World()
    await made.runs()
    yield made
    for task in made.tasks:
        task.cancel()


async def evaluating(world: World) -> asyncio.Task[list[Rollout]]:
    task = asyncio.create_task(world.service.generate(ASKED, stages.GREEDY))
    await settle()
    return task


def versions(answers: list[Rollout]) -> set[int]:
    return {span.version for answer in answers for span in answer.version_spans}


async def test_weight_syncs_go_on_during_an_evaluation_of_one_version(world: World) -> None:
    await world.synced(1)
    assert world.versions == [1, 1, 0, 0]
    task = await evaluating(world)
    assert world.versions == [1, 1, 1, 1]
    for version in (2, 3):
        await asyncio.wait_for(world.synced(version), 1)
    assert world.versions == [3, 3, 1, 1]
    for one in world.evaluators:
        one.goes_on.set()
    assert versions(await task) == {1}


async def test_with_answers_of_two_versions_an_evaluation_begins_anew(world: World) -> None:
    first, second = world.evaluators
    await world.synced(1)
    task = await evaluating(world)
    await world.synced(2)
    second.die()
    await rebuilt(world, 3)
    first.goes_on.set()
    assert versions(await asyncio.wait_for(task, 5)) == {2}
    assert [version for call, version in first.calls if call == "generate"] == [
        1,
        1,
        2,
    ]  # its own prompts, some of the other's, and all anew


async def rebuilt(world: World, index: int) -> None:
    """The next incarnation of a replica that died comes; it answers at once."""
    assert await world.ordered() == [index]
    made: Any = answering(f"eval/{index - 2}", goes_on=True)
    await world.service.deliver(world.numbers[index], StartedReplica(made, 1))
    await settle()


async def test_reports_and_events_name_them_and_answers_count_for_restarts(world: World) -> None:
    world.evaluators[0].die()
    await rebuilt(world, 2)
    report = await world.service.report()
    assert report.gauges["rebuilds"] == 1
    assert (report.gauges["replicas"], report.gauges["eval_replicas"]) == (2, 2)
    assert report.counters["eval_busy_s"] == 2 * 3.0
    assert [span.track for span in report.spans] == ["eval/0", "eval/1"]
    assert (report.busy, report.counters.get("tokens")) == ((), None)
    lines = (await world.service.events(0)).lines
    assert lines[0] == "eval/0 is ejected: eval/0: its process died"
    members = world.service.evaluators.stage.members
    before = [members.policy.reached(member) for member in members.all]
    for _ in range(2):
        await world.service.report()
    after = [members.policy.reached(member) for member in members.all]
    assert after == [count + 2 for count in before]
