"""A replica's worker on a real queue and a made-up engine: its batches, its rewards."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from async_opd.config.sections.evaluation import GradingConfig
from async_opd.core.batch import Batch, unpack
from async_opd.core.errors import QueueClosed, RolloutFault, StageError
from async_opd.core.row import Row
from async_opd.core.samples import DeadLetter, Group, Prompt, Rollout
from async_opd.core.sequence import spans_of
from async_opd.core.stages import DEAD, PROMPTS
from async_opd.grading.grader_pool import GraderSpec
from async_opd.grading.graders import GradeError
from async_opd.models.tokenizer import Text
from async_opd.queue.message_queue import MessageQueue
from rollouter.rollout_worker import Outbox, RewardGrader, RolloutWorker
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


class GatedQueue:
    """A queue whose puts wait for a gate."""

    def __init__(self) -> None:
        self.gate = asyncio.Event()
        self.batches: list[list[str]] = []
        self.error: BaseException | None = None

    async def put(self, topic: str, batch: Batch) -> None:
        await self.gate.wait()
        if self.error:
            raise self.error
        self.batches.append([row[0] for row in batch.rows])


def outbox() -> tuple[Outbox, GatedQueue]:
    queue: Any = GatedQueue()
    return Outbox(queue), queue


async def put_all(box: Outbox, *uids: str) -> list[asyncio.Task[None]]:
    tasks = []
    for uid in uids:
        tasks.append(asyncio.create_task(box.put("t", make_rollout(uid))))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
    return tasks


async def test_items_that_gather_while_the_queue_is_busy_leave_as_one_batch() -> None:
    """A put returns only when its item is in the queue."""
    box, queue = outbox()
    tasks = await put_all(box, "a/0", "b/0", "c/0")
    assert not any(task.done() for task in tasks)
    queue.gate.set()
    await asyncio.gather(*tasks)
    assert queue.batches == [["a/0"], ["b/0", "c/0"]]


async def test_an_error_of_the_queue_reaches_every_waiting_put() -> None:
    box, queue = outbox()
    queue.error = QueueClosed("closed")
    tasks = await put_all(box, "a/0", "b/0")
    queue.gate.set()
    results = await asyncio.gather(*tasks, return_exceptions=True)
    assert [type(result) for result in results] == [QueueClosed, QueueClosed]


async def test_a_put_after_an_error_is_tried_again() -> None:
    box, queue = outbox()
    queue.gate.set()
    queue.error = QueueClosed("closed")
    with pytest.raises(QueueClosed):
        await box.put("t", make_rollout("a/0"))
    queue.error = None
    await box.put("t", make_rollout("b/0"))
    assert queue.batches == [["b/0"]]


async def test_messages_have_bounded_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    packed = Batch.packed
    most = 2 * Batch.pack([make_rollout("a/0")]).nbytes
    monkeypatch.setattr(Batch, "packed", lambda items: packed(items, most))
    box, queue = outbox()
    tasks = await put_all(box, "a/0", "b/0", "c/0", "d/0")
    queue.gate.set()
    await asyncio.gather(*tasks)
    assert queue.batches == [["a/0"], ["b/0", "c/0"], ["d/0"]]


async def test_an_error_of_a_message_is_that_ones_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    packed = Batch.packed
    monkeypatch.setattr(Batch, "packed", lambda items: packed(items, 1))
    box, queue = outbox()
    tasks = await put_all(box, "a/0", "b/0", "c/0")
    put = queue.put

    async def refuses_b(topic: str, batch: Batch) -> None:
        if batch.headers[0].uid == "b/0":
            raise QueueClosed("closed")
        await put(topic, batch)

    queue.put = refuses_b
    queue.gate.set()
    results = await asyncio.gather(*tasks, return_exceptions=True)
    assert [type(result) for result in results] == [type(None), QueueClosed, type(None)]


async def test_a_cancelled_call_and_an_item_that_cannot_be_packed_raise_in_the_put() -> None:
    box, queue = outbox()
    queue.error = asyncio.CancelledError()
    queue.gate.set()
    with pytest.raises(StageError, match="was cancelled"):
        await asyncio.wait_for(box.put("t", make_rollout("a/0")), 5)
    item: Any = object()
    with pytest.raises(AttributeError):
        await asyncio.wait_for(box.put("t", item), 5)


async def test_a_put_whose_sender_is_closed_raises() -> None:
    box, _ = outbox()
    (task,) = await put_all(box, "a/0")
    box.close()
    with pytest.raises(StageError, match="the sender ended"):
        async with asyncio.timeout(5):
            await task


MODULE = """
def broken(response, row):
    raise ZeroDivisionError("oh")

def two(response, row):
    return 2
"""


def rollout(student: str, text: str, answer: str = "012") -> Rollout:
    """A response with its row."""
    ids = np.array(Text(student).encode(text), np.int32)
    row = Row("0:7", "sort", "sort 210=", answer, {})
    made = make_rollout("0:7#0/1", tokens=len(ids))
    return replace(made, continuation=ids, prompt=replace(make_prompt("0:7#0"), row=row))


@pytest.fixture
def student(quickstart: str) -> str:
    return f"{quickstart}/models/student"


def grading(student: str, grader: str = "exact") -> RewardGrader:
    return RewardGrader(GraderSpec(grader, GradingConfig(processes=1), start_s=60), student)


@pytest.mark.parametrize(("text", "reward"), [("012", 1.0), ("021", 0.0), ("", 0.0)])
async def test_a_rollout_gets_its_graders_number(student: str, text: str, reward: float) -> None:
    graded = await grading(student).grade(rollout(student, text))
    assert graded.reward == reward


async def test_the_texts_of_all_turns_are_graded_one_a_line(student: str) -> None:
    whole, tool = rollout(student, "012"), np.array(Text(student).encode("99"), np.int32)
    own = whole.response_ids
    spans = [("prompt", 3), ("student", 1), ("tool", len(tool)), ("student", len(own) - 1)]
    turns = replace(
        whole, continuation=np.concatenate([own[:1], tool, own[1:]]), spans=spans_of(spans)
    )
    row = replace(turns.prompt.row, answer="0\n12")  # type: ignore[type-var]
    turns = replace(turns, prompt=replace(turns.prompt, row=row))
    assert (await grading(student).grade(turns)).reward == 1


async def test_the_row_travels_no_further_and_is_needed(student: str) -> None:
    graded = await grading(student).grade(rollout(student, "012"))
    assert graded.prompt.row is None
    with pytest.raises(StageError, match="without its prompt's row"):
        await grading(student).grade(make_rollout())


@pytest.mark.parametrize(
    ("function", "fault"), [("broken", "ZeroDivisionError: oh"), ("two", "returned 2")]
)
async def test_what_a_grader_does_wrong_is_reported_with_the_rollout(
    student: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, function: str, fault: str
) -> None:
    (tmp_path / "faulty_graders.py").write_text(MODULE)
    monkeypatch.syspath_prepend(str(tmp_path))
    made = grading(student, f"faulty_graders:{function}")
    with pytest.raises(GradeError, match=rf"rollout 0:7#0/1: .*{fault}"):
        await made.grade(rollout(student, "012"))
    made.close()
