"""A replica's worker on a real queue and a made-up engine."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from async_opd.core.batch import Batch, unpack
from async_opd.core.errors import RolloutFault, StageError
from async_opd.core.samples import DeadLetter, Group, Prompt, Rollout
from async_opd.core.stages import DEAD, PROMPTS, SamplingSpec, topics
from async_opd.grading.graders import GradeError
from async_opd.queue.message_queue import MessageQueue
from rollouter.rollout_worker import RolloutWorker
from rollouter.slots import Slots
from rollouter.stage import RollouterStage
from tests.conftest import make_prompt, make_rollout


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


async def settle() -> None:
    for _ in range(30):
        await asyncio.sleep(0)


def queue() -> MessageQueue:
    return MessageQueue(topics(["math"]), 64, 1 << 20, 60.0, kept=(PROMPTS,))


def groups(*uids: str, n: int = 2) -> Batch:
    return Batch.pack(Group(make_prompt(uid, "math"), tuple(range(n))) for uid in uids)


def started(messages: MessageQueue, slots: int, name: str = "student/0") -> Any:
    engine = Engine()
    worker = RolloutWorker(name, messages, Slots(slots, 2), engine.sample)
    return engine, asyncio.create_task(worker.run())


async def test_every_member_of_a_group_is_sampled() -> None:
    messages = queue()
    engine, task = started(messages, 8)
    await messages.put(PROMPTS, groups("p", n=3))
    await settle()
    assert engine.asked == ["p/0", "p/1", "p/2"]
    task.cancel()


async def test_a_lease_is_acknowledged_although_no_further_prompts_come() -> None:
    messages = queue()
    engine, task = started(messages, 8)
    await messages.put(PROMPTS, groups("p"))
    await settle()
    engine.answers.release()
    engine.answers.release()
    await settle()
    stats = (await messages.stats())[PROMPTS]
    assert (stats.acked, stats.leased) == (1, 0)
    task.cancel()


async def test_of_a_feed_that_is_stopped_nothing_more_reaches_the_queue() -> None:
    messages, engine = queue(), Engine()
    worker = RolloutWorker("student/0", messages, Slots(8, 2), engine.sample)
    running = asyncio.create_task(worker.run())
    await messages.put(PROMPTS, groups("p"))
    await settle()
    await worker.stop()
    await asyncio.wait_for(running, 5)
    engine.answers.release()
    await settle()
    assert (await messages.stats())["rollouts/math"].put == 0


async def test_a_second_run_joins_the_first_and_takes_nothing_twice() -> None:
    messages, engine = queue(), Engine()
    worker = RolloutWorker("student/0", messages, Slots(8, 2), engine.sample)
    first, second = (asyncio.create_task(worker.run()) for _ in range(2))
    await messages.put(PROMPTS, groups("p"))
    await settle()
    engine.fails = True
    engine.answers.release()
    found = await asyncio.wait_for(asyncio.gather(first, second, return_exceptions=True), 5)
    assert engine.asked == ["p/0", "p/1"]
    assert [str(error) for error in found] == ["student/0: its process died"] * 2


async def test_a_rollout_is_graded_before_it_goes_on() -> None:
    async def grade(rollout: Rollout) -> Rollout:
        return replace(rollout, reward=0.5)

    messages, engine = queue(), Engine()
    worker = asyncio.create_task(
        RolloutWorker("student/0", messages, Slots(8, 2), engine.sample, grade).run()
    )
    await messages.put(PROMPTS, groups("p", n=1))
    engine.answers.release()
    lease = await asyncio.wait_for(messages.get("rollouts/math", 8), 5)
    assert [rollout.reward for rollout in unpack(Rollout, lease.batches)] == [0.5]
    worker.cancel()


async def test_the_worker_counts_the_rollouts_that_are_with_the_grader() -> None:
    graded = asyncio.Semaphore(0)

    async def grade(rollout: Rollout) -> Rollout:
        await graded.acquire()
        if rollout.uid == "p/0":
            raise GradeError("grader", "rollout p/0: it raised")
        return rollout

    messages, engine = queue(), Engine()
    worker = RolloutWorker("student/0", messages, Slots(8, 2), engine.sample, grade)
    work = asyncio.create_task(worker.run())
    await messages.put(PROMPTS, groups("p"))
    for _ in range(2):
        engine.answers.release()
    await settle()
    assert worker.grading == 2
    for _ in range(2):
        graded.release()
    await settle()
    assert worker.grading == 0
    work.cancel()


async def test_what_a_grader_fails_on_is_a_dead_letter_and_the_others_go_on() -> None:
    async def grade(rollout: Rollout) -> Rollout:
        if rollout.uid == "p/0":
            raise GradeError("grader", "rollout p/0: it raised")
        return rollout

    messages, engine = queue(), Engine()
    worker = asyncio.create_task(
        RolloutWorker("student/0", messages, Slots(8, 2), engine.sample, grade).run()
    )
    await messages.put(PROMPTS, groups("p"))
    for _ in range(2):
        engine.answers.release()
    dead = await asyncio.wait_for(messages.get(DEAD, 8), 5)
    alive = await asyncio.wait_for(messages.get("rollouts/math", 8), 5)
    (lost,) = unpack(DeadLetter, dead.batches)
    assert (lost.header.uid, lost.header.teacher, lost.stage) == ("p/0", "math", "grader")
    assert [rollout.uid for rollout in unpack(Rollout, alive.batches)] == ["p/1"]
    worker.cancel()


async def test_a_lease_is_finished_although_one_of_its_rollouts_was_lost() -> None:
    async def refuses(prompt: Prompt, uid: str) -> Rollout:
        raise RolloutFault("student", f"the engine refuses {uid}")

    messages = queue()
    worker = asyncio.create_task(RolloutWorker("student/0", messages, Slots(2, 2), refuses).run())
    await messages.put(PROMPTS, groups("p", "q"))
    await settle()
    assert (await messages.stats())[PROMPTS].acked == 2
    worker.cancel()


async def test_a_rollout_whose_own_log_probabilities_are_not_finite_is_a_dead_letter() -> None:
    async def diverged(prompt: Prompt, uid: str) -> Rollout:
        logprobs = np.array([0.0, np.nan, 0.0, 0.0], np.float32)
        return replace(make_rollout(uid, prompt.teacher), rollout_logprobs=logprobs)

    messages = queue()
    worker = asyncio.create_task(RolloutWorker("student/0", messages, Slots(2, 2), diverged).run())
    await messages.put(PROMPTS, groups("p", n=1))
    (lost,) = unpack(DeadLetter, (await asyncio.wait_for(messages.get(DEAD, 8), 5)).batches)
    assert (lost.stage, "not finite" in lost.reason) == ("student", True)
    worker.cancel()


async def test_an_evaluation_that_a_prompt_ends_kills_no_replica() -> None:
    class Refusing:
        async def generate(self, prompts: object, sampling: object) -> list[Rollout]:
            raise RolloutFault("student", "the engine refuses p/0")

    replicas: Any = {"student/0": Refusing(), "student/1": Refusing()}
    stage = RollouterStage(replicas, queue())
    with pytest.raises(RolloutFault, match="refuses p/0"):
        await stage.generate([make_prompt("p")], SamplingSpec(4, 0.0, 1.0, 1))
    assert len(stage.members.serving) == 2


async def test_a_finished_rollout_does_not_wait_for_its_group() -> None:
    messages = queue()
    engine, task = started(messages, 8)
    await messages.put(PROMPTS, groups("p"))
    engine.answers.release()
    lease = await asyncio.wait_for(messages.get("rollouts/math", 8), 5)
    assert len(unpack(Rollout, lease.batches)) == 1
    task.cancel()


async def test_no_more_is_taken_than_there_is_room_for() -> None:
    messages = queue()
    _, task = started(messages, 4)
    await messages.put(PROMPTS, groups(*(f"p{i}" for i in range(10))))
    await settle()
    assert (await messages.stats())[PROMPTS].ready == 8
    task.cancel()


async def test_replicas_share_what_is_there_evenly() -> None:
    messages = queue()
    feeds = [started(messages, 100, f"student/{i}") for i in range(4)]
    await settle()
    await messages.put(PROMPTS, groups(*(f"p{i}" for i in range(8))))
    await settle()
    assert [len(engine.asked) for engine, _ in feeds] == [4, 4, 4, 4]
    for _, task in feeds:
        task.cancel()


async def test_a_failure_of_the_engine_ends_the_loop_with_it() -> None:
    messages = queue()
    engine, task = started(messages, 2)
    engine.fails = True
    await messages.put(PROMPTS, groups("p"))
    engine.answers.release()
    with pytest.raises(StageError, match="its process died"):
        await asyncio.wait_for(task, 5)


async def test_what_a_dead_replica_had_taken_goes_to_the_others() -> None:
    messages = queue()
    _, task = started(messages, 8)
    await messages.put(PROMPTS, groups("p", "q"))
    await settle()
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert await messages.release(PROMPTS, "student/0") == 2
    other, alive = started(messages, 8, "student/1")
    await settle()
    assert other.asked == ["p/0", "p/1", "q/0", "q/1"]
    alive.cancel()
