"""The training stage: one batch, one optimizer step; and the sender of the weight sync.

    topic scored ──intake──► B samples ──► learner.train_batch ──► ack
                                               │
                                       snapshot(v) ──► send

Consumes batches (``trainer.intake``), produces weights, waits for scored samples. Computation runs
in a thread, so that the event loop answers while it trains.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING

from async_opd.core.activity import Activity
from async_opd.core.stages import StageReport, StepReport
from async_opd.core.weights import Rendezvous, WeightMeta
from trainer.intake import Intake
from trainer.publish import Publisher

if TYPE_CHECKING:
    from trainer.learner import Learner


class TrainerStage:
    """Implements ``async_opd.core.stages.Trainer`` and ``async_opd.core.weight_sync.WeightSender``.

    One rank trains, or all ranks of a sharded learner in lock-step; this stage is rank 0's.
    """

    def __init__(
        self,
        learner: Learner,
        publisher: Publisher,
        intake: Intake,
        *,
        max_version_lag: int | None,
        model_dir: str,
    ) -> None:
        self._learner = learner
        self._publisher = publisher
        self._intake = intake
        self._max_lag = max_version_lag
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
        clock = asyncio.get_running_loop().time
        asked = clock()
        taken = await self._intake.take(self._version)
        wait_s = clock() - asked
        self._waits_for = ""
        staleness = tuple(header.staleness(self._version) for header in taken.headers)
        async with self._weights:
            with self._activity.busy():
                report = await asyncio.to_thread(self._learner.train_batch, taken.samples)
        await self._intake.done()
        self._step += 1
        self._tokens += sum(header.tokens for header in taken.headers)
        metrics = {
            **report.metrics,
            "train/wait_s": wait_s,
            "train/duplicates": float(self._intake.duplicates),
        }
        if self._max_lag is not None:
            metrics["staleness/over_lag"] = float(sum(lag > self._max_lag for lag in staleness))
        return StepReport(
            self._step, taken.headers, staleness, metrics, taken.requeued, report.skipped
        )

    async def drop(self, uids: Sequence[str]) -> None:
        """These samples will never be trained: none of them is waited for."""
        await self._intake.drop(uids)

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

    async def open(self, wave: int, world_size: int) -> Rendezvous:
        """Opens the meeting point for the engines' workers of one wave."""
        return await asyncio.to_thread(self._publisher.open, wave, world_size)

    async def connect(self, wave: int) -> None:
        """Joins the wave's transfer group as rank 0."""
        await asyncio.to_thread(self._publisher.connect, wave)

    async def snapshot(self, version: int) -> WeightMeta:
        """Copies the weights out; they are ``version`` from now on."""
        async with self._weights:
            meta = await asyncio.to_thread(self._publisher.snapshot)
            self._version = version
        return meta

    async def send(self, wave: int) -> None:
        """Broadcasts the snapshot to one wave, while training goes on."""
        await asyncio.to_thread(self._publisher.send, wave)
