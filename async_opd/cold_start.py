"""The cold start: supervised steps of the trainer before distillation begins.

    prompts ──► answers, given or from the teachers ──batch──► trainer.supervise ──► metrics
                  └── those of the next step, while this one is computed

Nothing passes the queue or the ledger: no sample of the cold start counts as rolled out or trained.
A run that dies meanwhile begins it again; afterwards a checkpoint of step 0 has its weights.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol, TypeVar

from async_opd.config.sections.data import ColdStartConfig
from async_opd.core.batch import Batch
from async_opd.core.errors import RolloutFault, StageError
from async_opd.core.samples import DeadLetter, Prompt, Rollout, Sample
from async_opd.core.stages import Log, SamplingSpec, TeacherScorer, Trainer
from async_opd.data.answers import GivenAnswers, supervised
from async_opd.waiting.deadline import gather_or_cancel
from async_opd.waiting.reading_thread import ReadingThread

Result = TypeVar("Result")
ANSWERS = "answers of the cold start"
MAX_FAULTS = 10
"""Batches' worth of unusable rows in a row after which the cold start gives up."""


class Bounded(Protocol):
    """Awaits work, and stops the run if it makes no progress; see StallDetector.within."""

    async def __call__(
        self, what: str, work: Awaitable[Result], least_s: float = 0.0
    ) -> Result: ...


class Prompts(Protocol):
    """See ``async_opd.data.prompts.PromptStream``, whose prompts have their rows here."""

    def next(self, count: int) -> list[Prompt | DeadLetter]: ...


@dataclass
class ColdStart:
    """The supervised steps of a run. ``unusable`` is the number of rows left out so far."""

    config: ColdStartConfig
    batch_size: int
    rate: float
    """The learning rate after the warm-up."""
    prompts: Prompts
    given: GivenAnswers
    vocabulary: int
    """Rows of the student's embeddings: a row of the data with another token is left out.
    0: they are not known."""
    answers_s: Callable[[Sequence[Prompt], SamplingSpec], float]
    """Seconds that teachers may take for their answers; see ``teachers_s``."""
    log: Log
    reading: ReadingThread
    unusable: int = field(default=0, init=False)

    async def run(self, trainer: Trainer, scorer: TeacherScorer, bounded: Bounded) -> None:
        """Trains all steps and gives the trainer a new optimizer. StageError without answers."""
        self.log.message(f"cold start: {self.config.steps} supervised steps")
        answering = asyncio.create_task(self._batch(scorer, bounded), name=ANSWERS)
        try:
            for step in range(1, self.config.steps + 1):
                samples = await answering
                if step < self.config.steps:
                    answering = asyncio.create_task(self._batch(scorer, bounded), name=ANSWERS)
                found = await bounded(
                    f"step {step} of the cold start", self._step(trainer, step, samples)
                )
                self.log.log(0, found)
        finally:
            answering.cancel()
            await asyncio.wait({answering})
        await trainer.forget_moments()
        self.log.message(f"cold start: done, loss {found['cold_start/loss']:.4g}")

    async def _step(self, trainer: Trainer, step: int, samples: list[Sample]) -> dict[str, float]:
        rate = self.rate * min(1.0, step / max(self.config.warmup_steps, 1))
        found = await trainer.supervise(list(Batch.packed(samples)), rate)
        return {
            **{f"cold_start/{key}": value for key, value in found.items()},
            "cold_start/step": float(step),
            "cold_start/lr": rate,
            "cold_start/unusable_rows": float(self.unusable),
        }

    async def _batch(self, scorer: TeacherScorer, bounded: Bounded) -> list[Sample]:
        """The samples of the next step. StageError if too many rows have no answer."""
        samples: list[Sample] = []
        faults = 0
        while len(samples) < self.batch_size:
            prompts: list[Prompt] = []
            lacking = self.batch_size - len(samples)
            for one in await self.reading.run(partial(self.prompts.next, lacking)):
                if isinstance(one, DeadLetter):
                    faults += self._leave_out(one.reason)
                else:
                    prompts.append(one)
            for found in await self._answers(scorer, prompts, bounded):
                if isinstance(found, RolloutFault):
                    faults += self._leave_out(found.cause)
                elif foreign := self._foreign(found):
                    faults += self._leave_out(foreign)
                else:
                    samples.append(supervised(found))
            if faults > MAX_FAULTS * self.batch_size:
                raise StageError(
                    "cold start",
                    f"{faults} rows without a usable answer for a batch of {self.batch_size}",
                    "see the messages before; correct cold_start.data",
                )
        return samples

    async def _answers(
        self, scorer: TeacherScorer, prompts: list[Prompt], bounded: Bounded
    ) -> list[Rollout | RolloutFault]:
        if self.config.answers == "given":
            return [self._given(prompt) for prompt in prompts]
        sampling = SamplingSpec(
            max_tokens=self.given.limit, temperature=self.config.temperature, top_p=1.0, n=1
        )
        by_teacher: defaultdict[str, list[Prompt]] = defaultdict(list)
        for prompt in prompts:
            by_teacher[prompt.teacher].append(prompt)
        asked = gather_or_cancel(
            *(scorer.generate(name, own, sampling) for name, own in by_teacher.items())
        )
        answers = await bounded(ANSWERS, asked, self.answers_s(prompts, sampling))
        return [rollout.fault or rollout for part in answers for rollout in part]

    def _foreign(self, rollout: Rollout) -> str:
        """The fault of a token without an embedding in the student; empty if all have one."""
        largest = int(rollout.token_ids.max(initial=0))
        if largest < self.vocabulary or not self.vocabulary:
            return ""
        return f"row {rollout.prompt.uid} has token {largest}, the student {self.vocabulary} rows"

    def _given(self, prompt: Prompt) -> Rollout | RolloutFault:
        try:
            return self.given.rollout(prompt)
        except RolloutFault as fault:
            return fault

    def _leave_out(self, reason: str) -> int:
        """Counts a row that is not trained on; logs the first one's reason."""
        if not self.unusable:
            self.log.message(f"cold start: a row is left out, others are counted: {reason}")
        self.unusable += 1
        return 1
