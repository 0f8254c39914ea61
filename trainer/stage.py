"""The training stage: one batch, one optimizer step; and the sender of the weight sync.

    topic scored ──lease of B samples──► learner.train_batch ──► ack
                                             │
                                     snapshot(v) ──► send

Consumes leases of exactly one batch, produces weights, waits for scored samples. Computation runs
in a thread, so that the event loop answers while it trains.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from async_opd.core.activity import Activity
from async_opd.core.batch import unpack_samples
from async_opd.core.queue import Lease
from async_opd.core.stages import SCORED, Queue, StageReport, StepReport
from async_opd.core.weights import Rendezvous, WeightMeta
from trainer.publish import Publisher

if TYPE_CHECKING:
    from trainer.learner import Learner, LearnerReport


class TrainerStage:
    """Implements ``async_opd.core.stages.Trainer`` and ``async_opd.core.weight_sync.WeightSender``.

    One rank trains, or all ranks of a sharded learner in lock-step; this stage is rank 0's.
    """

    def __init__(
        self,
        learner: Learner,
        publisher: Publisher,
        queue: Queue,
        *,
        batch_size: int,
        model_dir: str,
    ) -> None:
        self._learner = learner
        self._publisher = publisher
        self._queue = queue
        self._batch_size = batch_size
        self._model_dir = model_dir
        self._activity = Activity("train")
        self._weights = asyncio.Lock()  # held while weights change or are copied
        self._step = 0
        self._version = 0
        self._tokens = 0
        self._waits_for = "scored samples"

    async def step(self) -> StepReport:
        """Waits for one batch, trains on it, acknowledges it."""
        self._waits_for = "scored samples"
        lease = await self._queue.get(SCORED, self._batch_size, self._batch_size)
        self._waits_for = ""
        headers = tuple(header for batch in lease.batches for header in batch.headers)
        async with self._weights:
            staleness = tuple(self._version - header.oldest_version for header in headers)
            with self._activity.busy():
                report = await asyncio.to_thread(self._train, lease)
        await self._queue.ack(SCORED, lease.id)
        self._step += 1
        self._tokens += sum(header.tokens for header in headers)
        return StepReport(self._step, headers, staleness, report.metrics)

    def _train(self, lease: Lease) -> LearnerReport:
        return self._learner.train_batch(unpack_samples(lease.batches))

    async def save(self, directory: str) -> None:
        """Writes the student in Hugging Face format."""
        from trainer.export import save_model

        async with self._weights:
            await asyncio.to_thread(save_model, self._learner.model, self._model_dir, directory)

    async def report(self) -> StageReport:
        """What happened since the last report."""
        tokens, self._tokens = self._tokens, 0
        return StageReport(
            counters={"tokens": float(tokens)},
            gauges={"version": float(self._version)},
            busy=self._activity.drain(),
            waits_for=self._waits_for,
        )

    # ── weight sync ────────────────────────────────────────────────────────────────────────────

    async def open(self, world_size: int) -> Rendezvous:
        """Opens the meeting point for the engines' workers."""
        return await asyncio.to_thread(self._publisher.open, world_size)

    async def connect(self) -> None:
        """Joins the transfer group as rank 0."""
        await asyncio.to_thread(self._publisher.connect)

    async def snapshot(self, version: int) -> WeightMeta:
        """Copies the weights out; they are ``version`` from now on."""
        async with self._weights:
            meta = await asyncio.to_thread(self._publisher.snapshot)
            self._version = version
        return meta

    async def send(self) -> None:
        """Broadcasts the snapshot, while training goes on."""
        await asyncio.to_thread(self._publisher.send)
