"""Evaluation answers beside rollouts: few while rollouts run, and no drain waits for them."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from async_opd.core.errors import RolloutFault, StageError
from async_opd.core.samples import Prompt, Rollout
from async_opd.core.stages import SamplingSpec
from rollouter.evaluation_worker import EvaluationWorker
from rollouter.slots import Slots
from tests.conftest import make_prompt, make_rollout
from tests.properties import examples
from tests.rollouter.test_slots import hold
from tests.world.clock import settle

TWO = SamplingSpec(4, 1.0, 1.0, 2)


class Engine:
    """Answers when the test sets it; ``asked`` counts the requests of each answer."""

    def __init__(self) -> None:
        self.finished = asyncio.Event()
        self.in_flight = 0
        self.asked: list[str] = []

    async def sample(
        self, prompt: Prompt, uid: str, sampling: SamplingSpec, turn: int = 0
    ) -> Rollout:
        self.asked.append(uid)
        self.in_flight += 1
        try:
            await self.finished.wait()
        finally:
            self.in_flight -= 1
        return make_rollout(uid)


async def begun(
    slots: Slots, prompts: int
) -> tuple[Engine, EvaluationWorker, asyncio.Task[list[Rollout]]]:
    engine = Engine()
    worker = EvaluationWorker(slots, engine.sample)
    asked = [make_prompt(f"p{i}") for i in range(prompts)]
    task = asyncio.create_task(worker.generate(asked, TWO))
    await settle(8)
    return engine, worker, task


async def test_answers_come_in_order_and_a_cancelled_evaluation_leaves_no_slot_behind() -> None:
    engine, _, task = await begun(Slots(3), 2)
    engine.finished.set()
    assert [rollout.uid for rollout in await task] == ["p0/0", "p0/1", "p1/0", "p1/1"]
    slots = Slots(2)
    engine, _, task = await begun(slots, 9)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await settle(8)
    assert (slots.evaluating, engine.in_flight) == (0, 0)


async def test_an_episode_that_cannot_be_played_is_an_answer_with_its_fault() -> None:
    async def play(prompt: Prompt, uid: str, *_: Any) -> Rollout:
        if prompt.uid == "p0":
            raise RolloutFault("environment", "its process died")
        return make_rollout(uid)

    worker = EvaluationWorker(Slots(3), Engine().sample, play, Slots(3))
    found = await worker.generate([make_prompt("p0"), make_prompt("p1")], TWO)
    assert [one.uid for one in found] == ["p0/0", "p0/1", "p1/0", "p1/1"]
    assert [one.fault and one.fault.cause for one in found] == ["its process died"] * 2 + [None] * 2


async def test_few_episodes_of_an_evaluation_begin_while_those_of_rollouts_run() -> None:
    room, release, begun = Slots(16), asyncio.Event(), list[str]()

    async def play(prompt: Prompt, uid: str, *_: Any) -> Rollout:
        begun.append(uid)
        await release.wait()
        return make_rollout(uid)

    rollouts = [asyncio.create_task(hold(room, release)) for _ in range(16)]
    await settle(8)
    worker = EvaluationWorker(Slots(99), Engine().sample, play, room)
    task = asyncio.create_task(worker.generate([make_prompt(f"p{i}") for i in range(20)], TWO))
    await settle(8)
    assert len(begun) == 2
    release.set()
    await asyncio.gather(task, *rollouts)
    assert len(begun) == 40


@pytest.mark.parametrize(("rollouts", "answers"), [(0, 16), (4, 8), (7, 2), (16, 2)])
async def test_an_evaluation_has_the_slots_left_over(rollouts: int, answers: int) -> None:
    slots, release = Slots(16), asyncio.Event()
    tasks = [asyncio.create_task(hold(slots, release)) for _ in range(rollouts)]
    await settle(8)
    engine, _, task = await begun(slots, 20)
    assert engine.in_flight == answers
    release.set()
    engine.finished.set()
    await asyncio.gather(task, *tasks)
    assert slots.evaluating == 0


async def test_answers_that_are_broken_off_begin_again_when_it_goes_on() -> None:
    engine, worker, task = await begun(Slots(2), 2)
    worker.break_off()
    await settle(8)
    assert (engine.in_flight, len(engine.asked)) == (0, 2)
    worker.go_on()
    await settle(8)
    assert (engine.in_flight, len(engine.asked)) == (2, 4)
    engine.finished.set()
    assert len(await task) == 4


@pytest.mark.parametrize("broken_off", [False, True])
async def test_answers_end_when_it_stops_and_later_ones_are_made(broken_off: bool) -> None:
    slots = Slots(2)
    engine, worker, task = await begun(slots, 9)
    if broken_off:
        worker.break_off()
    worker.stop()
    with pytest.raises(StageError, match="the replica was stopped"):
        await asyncio.wait_for(task, 5)
    assert (slots.evaluating, engine.in_flight) == (0, 0)
    worker.go_on()
    engine.finished.set()
    assert len(await asyncio.wait_for(worker.generate([make_prompt("q")], TWO), 5)) == 2


@examples(60)
@given(
    limit=st.integers(1, 9),
    moves=st.lists(st.sampled_from(["rollout", "done", "break", "go on", "wait"]), max_size=30),
)
def test_whatever_rollouts_do_the_evaluation_ends(limit: int, moves: list[str]) -> None:
    async def scenario() -> None:
        slots = Slots(limit)
        engine, worker, task = await begun(slots, 5)
        held: list[tuple[asyncio.Task[None], asyncio.Event]] = []
        for move in moves:
            if move == "rollout":
                release = asyncio.Event()
                held.append((asyncio.create_task(hold(slots, release)), release))
            elif move == "done" and held:
                held[0][1].set()
                await held.pop(0)[0]
            elif move == "break":
                worker.break_off()
            elif move == "go on":
                worker.go_on()
            await settle(8)
            assert slots.running == min(limit, len(held))
            assert slots.evaluating <= limit
        engine.finished.set()
        worker.go_on()
        found = await asyncio.wait_for(task, 5)  # though the rollouts still run
        assert [one.uid for one in found] == [f"p{i}/{m}" for i in range(5) for m in (0, 1)]
        for _, release in held:
            release.set()
        await asyncio.gather(*(rollout for rollout, _ in held))

    asyncio.run(scenario())
