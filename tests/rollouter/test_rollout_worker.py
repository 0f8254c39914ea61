"""A replica's worker on a real queue and a made-up engine."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from async_opd.core.batch import Batch, unpack
from async_opd.core.errors import RolloutFault, StageError
from async_opd.core.samples import DeadLetter, Group, Prompt, Rollout
from async_opd.core.stages import DEAD, PROMPTS
from async_opd.grading.graders import GradeError
from async_opd.queue.message_queue import MessageQueue
from rollouter.rollout_worker import RolloutWorker
from rollouter.slots import Slots
from tests.conftest import make_prompt, make_rollout
from tests.world.clock import settle
from tests.world.queue import message_queue


class Engine:
    """Answers when the test sets it."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.answers = asyncio.Semaphore(0)
        self.fails = False

    async def sample(self, prompt: Prompt, uid: str) -> Rollout:
        self.asked.append(uid)
        await self.answers.acquire()
        if self.fails:
            raise StageError("student/0", "its process died")
        return make_rollout(uid, prompt.teacher)


def groups(*uids: str, n: int = 2) -> Batch:
    return Batch.pack(Group(make_prompt(uid, "math"), tuple(range(n))) for uid in uids)


async def ungraded(rollout: Rollout) -> Rollout:
    return rollout


async def fails_on_the_first(rollout: Rollout) -> Rollout:
    if rollout.uid == "p/0":
        raise GradeError("grader", "rollout p/0: it raised")
    return rollout


class Working:
    """A worker with its queue and its engine, and its loop."""

    def __init__(
        self,
        slots: int = 8,
        name: str = "student/0",
        messages: MessageQueue | None = None,
        grade: Any = ungraded,
        sample: Any = None,
    ) -> None:
        self.engine, self.queue = Engine(), messages or message_queue("math")
        sample = sample or self.engine.sample
        self.worker = RolloutWorker(name, self.queue, Slots(slots, 2), sample, grade)
        self.task = asyncio.create_task(self.worker.run())

    async def gets(self, *uids: str, n: int = 2, answers: int = 0) -> None:
        """Groups of prompts come, and so many answers."""
        await self.queue.put(PROMPTS, groups(*uids, n=n))
        for _ in range(answers):
            self.engine.answers.release()
        await settle()

    async def rollouts(self) -> list[Rollout]:
        lease = await asyncio.wait_for(self.queue.get("rollouts/math", 8), 5)
        return unpack(Rollout, lease.batches)

    async def dead(self) -> list[DeadLetter]:
        return unpack(DeadLetter, (await asyncio.wait_for(self.queue.get(DEAD, 8), 5)).batches)

    async def stats(self) -> Any:
        return (await self.queue.stats())[PROMPTS]


@pytest.fixture
async def working() -> AsyncIterator[Working]:
    made = Working()
    yield made
    made.task.cancel()


async def test_no_rollout_waits_for_its_group_and_no_lease_for_prompts(working: Working) -> None:
    await working.gets("p", answers=1)
    assert len(await working.rollouts()) == 1
    working.engine.answers.release()
    await settle()
    stats = await working.stats()
    assert (stats.acked, stats.leased) == (1, 0)


async def test_a_stopped_worker_puts_nothing_more_into_the_queue(working: Working) -> None:
    await working.gets("p")
    await working.worker.stop()
    await asyncio.wait_for(working.task, 5)
    working.engine.answers.release()
    await settle()
    assert (await working.queue.stats())["rollouts/math"].put == 0


async def test_a_second_run_joins_the_first_and_takes_nothing_twice(working: Working) -> None:
    second = asyncio.create_task(working.worker.run())
    await working.gets("p")
    working.engine.fails = True
    working.engine.answers.release()
    both = asyncio.gather(working.task, second, return_exceptions=True)
    assert [str(e) for e in await asyncio.wait_for(both, 5)] == ["student/0: its process died"] * 2
    assert working.engine.asked == ["p/0", "p/1"]


async def test_a_rollout_is_graded_before_it_goes_on_and_counted_meanwhile() -> None:
    graded = asyncio.Semaphore(0)

    async def grade(rollout: Rollout) -> Rollout:
        await graded.acquire()
        return replace(await fails_on_the_first(rollout), reward=0.5)

    working = Working(grade=grade)
    await working.gets("p", answers=2)
    assert working.worker.grading == 2
    for _ in range(2):
        graded.release()
    assert [rollout.reward for rollout in await working.rollouts()] == [0.5]
    assert working.worker.grading == 0
    working.task.cancel()


async def test_a_rollout_that_cannot_be_graded_is_a_dead_letter_and_the_others_go_on() -> None:
    working = Working(grade=fails_on_the_first)
    await working.gets("p", answers=2)
    (lost,) = await working.dead()
    assert (lost.header.uid, lost.header.teacher, lost.stage) == ("p/0", "math", "grader")
    assert [rollout.uid for rollout in await working.rollouts()] == ["p/1"]
    working.task.cancel()


async def test_a_lease_is_finished_although_one_of_its_rollouts_was_lost() -> None:
    async def refuses(prompt: Prompt, uid: str) -> Rollout:
        raise RolloutFault("student", f"the engine refuses {uid}")

    working = Working(2, sample=refuses)
    await working.gets("p", "q")
    assert (await working.stats()).acked == 2
    working.task.cancel()


async def test_a_rollout_whose_own_log_probabilities_are_not_finite_is_a_dead_letter() -> None:
    async def diverged(prompt: Prompt, uid: str) -> Rollout:
        logprobs = np.array([0.0, np.nan, 0.0, 0.0], np.float32)
        return replace(make_rollout(uid, prompt.teacher), rollout_logprobs=logprobs)

    working = Working(2, sample=diverged)
    await working.gets("p", n=1)
    (lost,) = await working.dead()
    assert (lost.stage, "not finite" in lost.reason) == ("student", True)
    working.task.cancel()


async def test_no_more_is_taken_than_there_is_room_for() -> None:
    working = Working(4)
    await working.gets(*(f"p{i}" for i in range(10)))
    assert (await working.stats()).ready == 8
    working.task.cancel()


async def test_replicas_share_the_prompts_evenly() -> None:
    messages = message_queue("math")
    workers = [Working(100, f"student/{i}", messages) for i in range(4)]
    await settle()
    await workers[0].gets(*(f"p{i}" for i in range(8)))
    assert [len(one.engine.asked) for one in workers] == [4, 4, 4, 4]
    for one in workers:
        one.task.cancel()
