"""A replica's worker: takes groups when slots are free, and makes each of their rollouts.

    topic prompts ──lease──► members ──a slot each──► sample ──► grade ──► outbox ──► rollouts/…
                                                         └─────────┴──fault──► topic dead
                                                                             └── last one: ack

Consumes groups, produces rollouts, waits for a free slot, for prompts, for the engine and for room
in the queue. A rollout that is graded or waits for room in the queue holds no slot. When a replica
dies, its leases are released, and the other replicas take their groups.

``Outbox`` puts finished items into the queue, in batches whose size follows the queue's speed.

In a run with task rewards the replica that sampled a rollout has it graded:

    Rollout(prompt with its row) ──decode, grade in the grader's process──► Rollout(reward; no row)
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import replace
from itertools import islice

import numpy as np

from async_opd.core.batch import Batch
from async_opd.core.errors import RolloutFault, StageError, first_cause
from async_opd.core.samples import DeadLetter, Group, Prompt, Rollout, Sample
from async_opd.core.stages import DEAD, PROMPTS, Queue, rollouts_topic
from async_opd.core.uid import Uid, rollout_uid
from async_opd.grading.grader_pool import Graders, GraderSpec
from async_opd.grading.graders import GradeError
from async_opd.models.tokenizer import Text
from rollouter.slots import SlotReservation, Slots

MakeRollout = Callable[[Prompt, Uid], Awaitable[Rollout]]
GradeRollout = Callable[[Rollout], Awaitable[Rollout]]
Entry = tuple[Rollout | Sample, asyncio.Future[None]]


class Outbox:
    """One sender per topic: the items that finish while it puts a batch are its next batch.

    There is no timer: the sender puts a single item at once, and batches grow with the time that
    the queue takes.
    """

    def __init__(self, queue: Queue) -> None:
        self._queue = queue
        self._waiting: dict[str, list[Entry]] = {}
        self._senders: dict[str, asyncio.Task[None]] = {}

    async def put(self, topic: str, item: Rollout | Sample) -> None:
        """Returns when the item is in the queue; raises the error of the queue."""
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(topic, []).append((item, future))
        if topic not in self._senders:
            self._senders[topic] = asyncio.create_task(self._send(topic), name=f"outbox {topic}")
        await future

    def close(self) -> None:
        """Cancels the senders; waiting items never reach the queue."""
        for sender in self._senders.values():
            sender.cancel()
        self._waiting.clear()

    async def _send(self, topic: str) -> None:
        try:
            while self._waiting.get(topic):
                entries, self._waiting[topic] = self._waiting[topic], []
                cause = "the sender ended before it put all items that had finished"
                unsent: Exception = StageError("outbox", cause)
                try:
                    await self._put(topic, entries)
                except Exception as error:  # an item that cannot be packed
                    unsent = error
                finally:  # no ``put`` waits for a sender that does not go on
                    _settle(entries, unsent)
        finally:
            del self._senders[topic]

    async def _put(self, topic: str, entries: list[Entry]) -> None:
        left = iter(entries)
        for batch in Batch.packed(item for item, _ in entries):
            sent = list(islice(left, len(batch)))
            try:
                await self._queue.put(topic, batch)
            except asyncio.CancelledError:
                if asyncio.current_task().cancelling():  # type: ignore[union-attr]
                    raise
                # not ``close``: Ray ends a call that it has cancelled so
                cause = "the call that puts finished items into the queue was cancelled"
                _settle(sent, StageError("queue", cause, "see ray_messages.log"))
            except Exception as error:
                _settle(sent, error)
            else:
                _settle(sent, None)


def _settle(entries: list[Entry], error: Exception | None) -> None:
    for _, future in entries:
        if future.done():  # its ``put`` was cancelled
            continue
        if error is None:
            future.set_result(None)
        else:
            future.set_exception(error)


class RolloutWorker:
    """``sample(prompt, uid)`` makes one rollout; ``slots`` bounds how many at the same time.

    ``grade`` adds the reward to a rollout, in runs with a grader.
    """

    def __init__(
        self,
        replica: str,
        queue: Queue,
        slots: Slots,
        sample: MakeRollout,
        grade: GradeRollout | None = None,
    ) -> None:
        self.rollouts = 0
        self.grading = 0
        """Rollouts that are with the grader now."""
        self._replica = replica
        self._queue = queue
        self._slots = slots
        self._sample = sample
        self._grade = grade
        self._outbox = Outbox(queue)
        self._left: Counter[int] = Counter()  # lease -> its rollouts that are not in the queue yet
        self._finished: list[int] = []
        self._waits_for_prompts = False  # ``_pull`` is in ``get`` now
        self._work: asyncio.Task[None] | None = None

    async def run(self) -> None:
        """Works until stopped or cancelled; raises the first error of a rollout.

        Unfinished rollouts never reach the queue then. A later call starts anew; a call during
        another joins its work: the rollouter's actor may die, and the next one calls ``run`` again.
        """
        if self._work is None or self._work.done():
            self._work = asyncio.create_task(self._pull(), name="worker")
        try:
            await asyncio.wait({self._work})
        finally:
            await self.stop()
        if not self._work.cancelled():
            self._work.result()

    async def stop(self) -> None:
        """Ends ``run``, and drops the groups that are not finished."""
        if self._work is not None:
            self._work.cancel()
            await asyncio.wait({self._work})

    async def _pull(self) -> None:
        try:
            async with asyncio.TaskGroup() as rollouts:
                while True:
                    free = await self._slots.room()
                    done, self._finished = tuple(self._finished), []
                    self._waits_for_prompts = True
                    lease = await self._queue.get(
                        PROMPTS, free, ack=done, consumer=self._replica, share=True
                    )
                    self._waits_for_prompts = False
                    for group in lease.items(Group):
                        self._left[lease.id] += len(group.members)
                        for member in group.members:
                            reservation = self._slots.reserve()
                            rollouts.create_task(self._roll(group, member, lease.id, reservation))
        except ExceptionGroup as errors:
            raise first_cause(errors) from errors
        finally:
            self._outbox.close()
            self._left.clear()
            self._finished.clear()

    async def _roll(
        self, group: Group, member: int, lease: int, reservation: SlotReservation
    ) -> None:
        """Makes one rollout and puts it into the queue; acknowledges the lease after its last."""
        prompt, uid = group.prompt, rollout_uid(group.prompt.uid, member)
        try:
            rollout = await self._rollout(prompt, uid, reservation)
        except RolloutFault as fault:  # the prompt's or the grader's: the replica goes on
            lost = DeadLetter.of_prompt(prompt, uid, fault.stage, fault.cause)
            await self._queue.put(DEAD, Batch.pack([lost]))
        else:
            self.rollouts += 1
            await self._outbox.put(rollouts_topic(prompt.teacher), rollout)
        self._left[lease] -= 1
        if not self._left[lease]:
            del self._left[lease]
            # The next ``get`` carries the ack of the lease, which saves a call. While ``_pull``
            # waits in ``get`` already, the next one may be far away: until the ack the group takes
            # room in the topic, and is sampled again if this replica dies.
            if self._waits_for_prompts:
                await self._queue.ack(PROMPTS, lease)
            else:
                self._finished.append(lease)

    async def _rollout(self, prompt: Prompt, uid: Uid, reservation: SlotReservation) -> Rollout:
        """Samples and grades. RolloutFault if the engine, the numbers or the grader refuse it."""
        async with reservation:
            rollout = await self._sample(prompt, uid)
        if not np.isfinite(rollout.rollout_logprobs).all():
            cause = f"rollout {uid}: the student's own log-probabilities are not finite"
            raise RolloutFault("student", cause, "its weights may have diverged: lower train.lr")
        if self._grade is None:
            return rollout.without_row
        self.grading += 1
        try:
            return await self._grade(rollout)
        finally:
            self.grading -= 1


class RewardGrader:
    """A grader, and the student's tokenizer to decode responses for it."""

    def __init__(self, grader: GraderSpec, model_dir: str) -> None:
        self._graders = Graders(grader)
        self._text = Text(model_dir)

    async def grade(self, rollout: Rollout) -> Rollout:
        """The rollout with its reward and without its row, which no later stage needs.

        GradeError with the rollout's uid if the grader raises, returns no number from 0 to 1, or
        takes too long. StageError for a rollout without a row.
        """
        row = rollout.prompt.row
        if row is None:
            raise StageError("grader", f"rollout {rollout.uid} came without its prompt's row")
        try:
            text = "\n".join(self._text.decode(turn.tolist()) for turn in rollout.turns)
            reward = float(await self._graders.grade(text, row))
        except GradeError as error:
            cause = f"rollout {rollout.uid}: {error.cause}"
            raise GradeError(error.stage, cause, error.remedy) from error
        return replace(rollout.without_row, reward=reward)

    def close(self) -> None:
        """Ends the grader's processes."""
        self._graders.close()
