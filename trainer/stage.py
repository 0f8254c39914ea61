"""The training stage: one batch, one optimizer step; and the sender of the weight sync.

    topic scored ──batcher──► B samples ──► learner.train_batch ──► ack     one rank
       │         ──hand_out─► B headers ──► learner.train ──► ack           several, each of which
       └──samples of each rank──────────────────┘                           fetches its samples
                                               │
                                       snapshot(v) ──► send
                                       capture ──► checkpoint

Consumes batches (``trainer.batcher``), produces weights, waits for scored samples. All work with
the model runs on one thread (``trainer.work_thread``), all connections and transfers on another
one: the event loop answers calls during a step, and no transport changes the CUDA stream of a step.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Coroutine, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from async_opd.core.batch import Batch, unpack
from async_opd.core.errors import CheckpointError, StageError
from async_opd.core.reports import Captured, Progress, StageReport, StepReport, WrittenFile
from async_opd.core.samples import Sample
from async_opd.core.stages import TRAINER
from async_opd.core.uid import Uid
from async_opd.media.cache import MediaCache, with_images
from async_opd.observability.activity import Activity
from async_opd.sharing.gpu_turns import GpuTurns
from async_opd.waiting.deadline import Gate, to_its_end
from async_opd.weight_sync.layout import HeldRow, Rendezvous, WeightMeta
from trainer.batcher import Batcher, TrainBatch
from trainer.batches.shares import HandOut
from trainer.publisher import Publisher
from trainer.rank_group import SINGLE_RANK, RankGroup, retrieve_exception, run_with_ranks
from trainer.vision.fetching import refuse_unseen, shown_by, take_seen
from trainer.work_thread import WorkThread

if TYPE_CHECKING:
    from trainer.learner import Learner, LearnerReport

HOLD_S = 60.0
"""Seconds for which a turn is held for a snapshot. The rollout stage calls it at once, or died."""
P = ParamSpec("P")
T = TypeVar("T")


@dataclass(frozen=True)
class _Captured:
    """The weight version that the ranks have captured, and the samples that were held then."""

    version: int
    samples: asyncio.Task[tuple[Sample, ...]]


class TrainerStage:
    """Implements ``stages.Trainer`` and ``weight_sync.sync_group.WeightSender``.

    One rank trains, or several in lock-step (``trainer.rank_group``); the stage runs in rank 0's
    process.
    """

    def __init__(
        self,
        learner: Learner,
        publisher: Publisher,
        batcher: Batcher,
        *,
        max_version_lag: int | None,
        model_dir: str,
        rank_group: RankGroup = SINGLE_RANK,
        held_rows: Sequence[HeldRow] = (),
        turns: GpuTurns | None = None,
        media: MediaCache | None = None,
    ) -> None:
        """``held_rows`` are those of ``async_opd.weight_sync``; ``media`` of a VLM student.

        With ``turns`` the learner is offloaded now, and onloaded in these only.
        """
        self._held_rows = held_rows
        self._learner = learner
        self._publisher = publisher
        self._batcher = batcher
        alone = rank_group.ranks == 1
        self._media = media
        self._hand_out = None if alone else HandOut(batcher, learner, rank_group, media)
        self._max_lag = max_version_lag
        self._model_dir = model_dir
        self._rank_group = rank_group
        self._computing, self._sending = WorkThread("train"), WorkThread("send weights")
        self._activity = Activity("step", track="trainer/0")
        self._weights = asyncio.Lock()  # held while weights change or are copied
        self._gate = Gate()
        self._turns = turns
        self._gpus: AbstractAsyncContextManager[None] = turns or nullcontext()
        # A single rank needs no GPU to copy its tensors; several gather theirs over the GPUs.
        self._gathers = self._gpus if rank_group.ranks > 1 else nullcontext()
        self._step = 0
        self._report: StepReport | None = None  # of the last step
        self._version = 0
        self._captured: _Captured | None = None
        self._writing: asyncio.Task[Mapping[str, WrittenFile]] | None = None
        self._tokens = self._pending_tokens = 0
        self._waits_for = "scored samples"

    async def step(self) -> StepReport:
        """Waits for one batch, trains on it, acknowledges it."""
        self._waits_for = "scored samples"
        clock = asyncio.get_running_loop().time
        started = clock()
        taken, train = await self._take()
        wait_s = clock() - started
        self._waits_for = "its GPU, which others use"
        staleness = tuple(header.staleness(self._version) for header in taken.headers)
        async with self._gate, self._gpus, self._weights:
            self._waits_for = ""
            waited = {"train/wait_s": wait_s, "train/wait_gpu_s": clock() - started - wait_s}
            # Nothing ends the thread that trains: weights and step number change together, also if
            # this call is cancelled. The checkpoint that follows has both.
            done = await to_its_end(self._trained(taken, train, staleness, waited))
        await self._batcher.done()
        self._tokens += sum(header.tokens for header in taken.headers)
        return done

    async def _trained(
        self,
        taken: TrainBatch,
        train: Callable[[], LearnerReport],
        staleness: tuple[int, ...],
        waited: dict[str, float],
    ) -> StepReport:
        """Trains on a batch, and counts the step."""
        self._learner.version = self._version
        self._pending_tokens = sum(header.tokens for header in taken.headers)
        with self._activity.busy() as begun:
            report = await self._compute(train)
            computed = self._activity.since(begun)
        metrics = {
            **report.metrics,
            **waited,
            "train/duplicates": float(self._batcher.duplicates),
            "train/duplicate_tokens": float(self._batcher.duplicate_tokens),
        }
        if self._max_lag is not None:
            metrics["staleness/over_lag"] = float(sum(lag > self._max_lag for lag in staleness))
        self._step += 1
        # with the weights: a checkpoint has it too if the answer is lost
        self._report = done = StepReport(
            self._step,
            taken.headers,
            staleness,
            metrics,
            taken.requeued,
            report.skipped,
            report.notes,
            computed,
        )
        return done

    async def _take(self) -> tuple[TrainBatch, Callable[[], LearnerReport]]:
        """A batch whose samples this rank, or each of several ranks, has; and the step on it."""
        if self._hand_out is None:
            taken, images = await take_seen(self._batcher, self._version, self._media)
            return taken, partial(self._learner.train_batch, taken.samples, images)
        assigned = await self._hand_out.take(self._version)
        own = assigned.own.micro_batches
        repetition, number = assigned.repetition, assigned.number
        train = partial(self._learner.train, assigned.plan, own, repetition, number)
        return assigned.batch, train

    async def drop(self, lost: Uid, others: Sequence[Uid] = ()) -> bool:
        """See Batcher.drop."""
        return await self._batcher.drop(lost, others)

    async def save(self, directory: str) -> None:
        """Writes the student to the directory in Hugging Face format."""
        async with self._gathers, self._weights:
            await self._compute(self._learner.save, self._model_dir, directory)
            if self._gate.closed:  # gathering full tensors of several ranks leaves a cache
                await self._compute(self._learner.free_cache)

    def _compute(
        self, work: Callable[P, T], *args: P.args, **named: P.kwargs
    ) -> Coroutine[Any, Any, T]:
        """Runs the work on the thread that trains; raises another rank's failure before it."""
        return run_with_ranks(self._rank_group, self._computing.run(work, *args, **named))

    async def report(self) -> StageReport:
        """Tokens and busy time since the last report, the version, and what the stage waits for."""
        tokens, self._tokens = self._tokens, 0
        report = StageReport(
            counters={"tokens": float(tokens)},
            gauges={"version": float(self._version)},
            busy=self._activity.drain(),
            waits_for=self._waits_for,
            spans=(*self._rank_group.spans(), *self._batcher.arrivals()),
        )
        return with_images(report, self._media)

    # ── checkpoints ────────────────────────────────────────────────────────────────────────────

    async def capture(self) -> Captured:
        """Copies the trainer's state to host memory, between two steps; see Trainer.capture."""
        if self._writing is not None and not self._writing.done():  # a second copy beside it
            cause = "the copy of a checkpoint that was given up is still being written"
            raise CheckpointError(TRAINER, cause, "see checkpoint.timeout_s")
        async with self._weights:
            nbytes = await self._compute(self._learner.capture, self._version)
            self._captured = _Captured(self._version, self._batcher.copy_held())
        return Captured(self._step, self._report, nbytes)

    async def checkpoint(
        self, directory: str, in_flight: frozenset[Uid]
    ) -> Mapping[str, WrittenFile]:
        """Writes the captured state, in threads of all ranks; see Trainer.checkpoint."""
        from trainer.saving.sample_file import SCORED_FILE, write_scored

        captured, self._captured = self._captured, None
        if captured is None:
            raise CheckpointError("trainer", "checkpoint was called without a capture before it")
        samples = await self._scored(captured, in_flight)
        write = asyncio.to_thread(self._learner.write, directory)
        self._writing = asyncio.create_task(write, name="write a checkpoint")
        self._writing.add_done_callback(retrieve_exception)
        files = await asyncio.shield(self._writing)  # nothing ends the threads that write
        scored = await asyncio.to_thread(write_scored, Path(directory), samples)
        return {**files, SCORED_FILE: scored}

    async def restore(self, directory: str) -> frozenset[Uid]:
        """Sets the state that a checkpoint holds; see Trainer.restore."""
        from trainer.saving.sample_file import read_scored

        samples = await asyncio.to_thread(read_scored, Path(directory))
        async with self._gpus, self._weights:
            self._step, self._version = await self._compute(self._learner.restore, directory)
            self._report = None
        self._batcher.hold(samples)
        return frozenset(sample.rollout.uid for sample in samples)

    async def adopt(self, directory: str, step: int, version: int) -> None:
        """See Trainer.adopt. It needs no turn: weights are read to where they are now."""
        async with self._weights:
            await self._compute(self._learner.adopt, directory, step)
            self._step, self._version, self._report = step, version, None

    async def supervise(self, batches: Sequence[Batch], rate: float) -> dict[str, float]:
        """See Trainer.supervise."""
        samples = await asyncio.to_thread(unpack, Sample, batches)
        async with self._gate, self._gpus, self._weights:
            self._pending_tokens = sum(sample.rollout.tokens for sample in samples)
            with self._activity.busy():
                images, unseen = await shown_by(samples, self._media)
                refuse_unseen(unseen)
                found = await self._compute(self._learner.supervise, samples, rate, images)
        self._tokens += self._pending_tokens
        return found

    async def forget_moments(self) -> None:
        """See Trainer.forget_moments."""
        async with self._gpus, self._weights:
            await self._compute(self._learner.forget_moments)

    async def scale_learning_rate(self, factor: float) -> None:
        """See Trainer.scale_learning_rate."""
        self._learner.lr_factor = factor

    async def _scored(self, captured: _Captured, in_flight: frozenset[Uid]) -> list[Sample]:
        """The scored samples of these uids that the batcher held or the queue has, by uid.

        A sample with a token of a later version than the captured one is left out: its prompt is in
        flight in the checkpoint and is sampled again at a resume.
        """
        found = {sample.rollout.uid: sample for sample in await captured.samples}
        with suppress(StageError):  # the queue died: its samples are resampled at a resume
            async for samples in self._batcher.queued(in_flight - found.keys()):
                found |= {sample.rollout.uid: sample for sample in samples}
        return [
            sample
            for uid, sample in sorted(found.items())
            if uid in in_flight
            and all(span.version <= captured.version for span in sample.rollout.version_spans)
        ]

    # ── time sharing with teachers on the same GPU ─────────────────────────────────────────────

    async def idle(self) -> None:
        """Waits until no step is under way."""
        await self._gate.empty()

    async def sleep(self) -> None:
        """Finishes the step under way, frees cached GPU memory; the next step waits for ``wake``.

        Weights and optimizer state stay on the GPU. A ``wake`` before the step has ended keeps the
        cached memory: the caller of ``sleep`` has gone.
        """
        if await self._gate.close():
            await self._compute(self._learner.free_cache)

    async def wake(self) -> None:
        """Lets the next step begin."""
        self._gate.open()

    async def progress(self) -> Progress:
        """Tokens that rank 0 has computed; ``most`` are the batch's, which all ranks share."""
        return Progress(self._learner.computed_tokens, self._pending_tokens)

    # ── turns on GPUs that it shares with rollout engines: time_sharing.GpuGuests ──────────────

    async def wait_asleep(self, pool: str) -> None:
        """Returns when the learner is offloaded."""
        assert self._turns is not None
        await self._turns.over()

    async def wait_for_work(self, pool: str) -> None:
        """Returns when a step, a snapshot or another use of the GPUs waits for a turn."""
        assert self._turns is not None
        await self._turns.wanted()

    async def wait_for_backlog(self, pool: str) -> None:
        """The same: a batch is complete, and everything after it waits for the trainer."""
        await self.wait_for_work(pool)

    async def take_turn(self, pool: str) -> None:
        """Onloads the learner, lets work begin until none is left, and offloads it again."""
        assert self._turns is not None
        onload, offload = self._learner.onload, self._learner.offload
        await self._turns.take(lambda: self._compute(onload), lambda: self._compute(offload))

    async def begin_turn(self, pool: str) -> None:
        """Returns in a turn, which lasts until ``snapshot``, or for ``HOLD_S`` if none comes."""
        assert self._turns is not None
        await self._turns.hold(HOLD_S)

    # ── weight sync ────────────────────────────────────────────────────────────────────────────

    async def open(self, group: int, world_size: int, connected: Collection[int]) -> Rendezvous:
        """Opens the rendezvous for the engines' workers of one sync group; see WeightSender."""
        return await self._sending.run(self._publisher.open, group, world_size, connected)

    async def connect(self, group: int) -> None:
        """Joins the transfer group of that sync group as rank 0."""
        await self._sending.run(self._publisher.connect, group)

    async def snapshot(self, version: int, compare: bool = False) -> WeightMeta:
        """Copies the weights; the trainer's weight version is ``version`` from now on.

        ``compare``: the metadata has the log-probabilities of held rows under these weights.
        """
        async with self._gpus, self._weights:
            meta = await self._compute(self._publisher.snapshot)
            if compare and self._held_rows:
                reference = await self._compute(self._learner.reference, self._held_rows)
                meta = replace(meta, reference=reference)
            # samples of a version that was restored may be of weights before the checkpoint's
            if version > self._version or not self._step:
                self._learner.unchanged = True
            self._version = version
        if self._turns is not None:
            self._turns.release()
        return meta

    async def send(self, group: int) -> float:
        """Broadcasts the snapshot to one sync group, while training goes on; see WeightSender."""
        return await self._sending.run(self._publisher.send, group)
