"""The pipeline: the life of one sample, top to bottom, with one coroutine per arrow.

     admit ──prompts──► Rollouter ──rollouts──► TeacherScorer ──scored──► Trainer
       ▲   ▲              ▲                           │                   │  │
       │   ├──────────────┼──── replace ◄──── dead ───┘                   │  │
       │   └──────────────┼──── rerun ◄────────────── stale ──────────────┘  │
       └──── version ─────┴──── push ◄────────────── snapshot ───────────────┘

    admit     produces groups,           waits for the staleness budget and for room in the queue
    rollouter (replicas' own loops)      wait for a free slot, groups, the engine, room in the queue
    scorer    (its own loop)             waits for rollouts, a teacher, room in the queue
    rerun     consumes stale headers,    waits for samples that came too late
    replace   consumes dead letters,     waits for rollouts that cannot be sampled or scored
    train     consumes scored batches,   waits for one batch; snapshots every ``sync_steps`` steps,
                                         and captures a checkpoint every so many steps
    push      consumes a snapshot,       begins an evaluation, for which nothing waits
    events    consumes events,           waits for those of replicas and leases

All of them run at the same time. The first one that ends with an error ends the run with it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from async_opd.accounting.journal import Journal
from async_opd.accounting.replacements import ReplayablePrompts
from async_opd.accounting.run_state import Cut, RunState
from async_opd.checkpoint.checkpointer import Checkpointer
from async_opd.checkpoint.store import Checkpoint
from async_opd.cold_start import ColdStart
from async_opd.config.run_config import RunConfig
from async_opd.core.errors import CheckpointError, StageError, first_cause
from async_opd.core.reports import ADMISSION, Captured, StageReport, StepReport
from async_opd.core.samples import DeadLetter, Group
from async_opd.core.stages import DEAD, LOG, STALE, Log, Stages, TopicStats
from async_opd.grading.evaluation import Evaluation
from async_opd.grading.evaluation_runs import EvaluationRuns, Evaluations
from async_opd.observability.activity import admitted, traced
from async_opd.observability.metering import Metering
from async_opd.observability.run_log import LAST_EVENTS_S, EventForwarder
from async_opd.observability.stall import NO_TOKEN, StallDetector, teachers_s
from async_opd.waiting.deadline import endless
from async_opd.waiting.reading_thread import ReadingThread
from async_opd.waiting.waits import Waits

Result = TypeVar("Result")


@dataclass
class Pipeline:
    """One run over given stages. ``run`` returns when every step is trained and evaluated."""

    config: RunConfig
    stages: Stages
    prompts: ReplayablePrompts
    evaluation: Evaluation | None
    log: Log
    journal: Journal | None = None
    checkpointer: Checkpointer | None = None
    start: Checkpoint | None = None
    """The checkpoint at which the run continues; ``prompts`` stands at its cursor."""
    pushes_first: bool = False
    """Replicas get the trainer's weights, and are compared with it, before the first prompt."""
    evaluated: int = -1
    """The last step whose evaluation is logged."""
    cold_start: ColdStart | None = None
    lr_factor: float = 1.0
    """Factor of all learning rates, below 1 after the guardrail's rollbacks."""
    waits: Waits | None = None
    """Names what the pipeline waits for; by default a new one."""
    reading: ReadingThread | None = None
    """Where ``prompts`` are read: a source may be late, or hang."""

    def __post_init__(self) -> None:
        """Makes the run state, the schedule of evaluations, and the metering."""
        cut = None if self.start is None else self.start.cut
        self.run_state = RunState(self.config, self.prompts, self.log, self.journal, cut)
        self.schedule = Evaluations(self.config, self.log, self.evaluated)
        self.metering = Metering(self.config.log.pools_every_s, before=self.log.last)
        self._step = self.run_state.step
        self._events = EventForwarder(self.log)
        self._issued = self._restored = self.start is None
        self._queue_restarted = False
        self._past_cold_start = self.cold_start is None
        self.rewound = False
        self._pushing: asyncio.Task[None] | None = None
        self._unlogged: list[StepReport] = []
        self._coroutines = asyncio.TaskGroup()
        self._taking = asyncio.Lock()
        self._reading = self.reading or ReadingThread("prompts", self.config.timeouts.stall_s)
        evaluated = 0 if self.evaluation is None else self.evaluation.requests
        self._waits = self.waits or Waits(self.log.message)
        stall = StallDetector(self.config, self.stages, self.metering, self._waits, evaluated)
        self._bounded = stall.within
        self.evaluations = EvaluationRuns(
            self.evaluation,
            self.schedule,
            self.stages,
            self._bound_evaluation,
            images=self.run_state.images,
            version=lambda: self.run_state.admission.version,
            ungraded=self.run_state.supply.ungraded,
            noted=None if self.checkpointer is None else self.checkpointer.evaluated,
        )
        if self.checkpointer is not None:
            self.checkpointer.evaluating = lambda: self.evaluations.measured

    async def run(self) -> None:
        """Evaluates, trains all steps, evaluates. Raises the first error of any stage."""
        supervising = self.stages.supervise(self._reissue, lambda: self.run_state.step)
        try:
            async with self._coroutines as coroutines:
                loops: list[asyncio.Task[None]] = [
                    coroutines.create_task(endless("supervision", supervising)),
                    coroutines.create_task(endless("rollouter", self.stages.rollouter.run())),
                    coroutines.create_task(endless("scorer", self.stages.scorer.run())),
                    coroutines.create_task(self._events.forward(self.stages.rollouter)),
                    coroutines.create_task(self._events.forward(self.stages.scorer)),
                    coroutines.create_task(self._events.forward(self.stages.queue)),
                ]
                if self.lr_factor != 1:
                    await self.stages.trainer.scale_learning_rate(self.lr_factor)
                if self.start is None:
                    await self._first_weights()
                else:
                    await self._resume(self.start)
                if self.run_state.step == 0 and (asked := self.evaluation) is not None:
                    least_s = teachers_s(self.config, asked.prompts, asked.sampling)
                    await self.evaluations.measure_first(self.config.eval, self.log.last, least_s)
                loops.append(coroutines.create_task(self._admit()))
                loops.append(coroutines.create_task(self._requeue_stale()))
                loops.append(coroutines.create_task(self._replace()))
                await self._train()
                with self._waits.on("the evaluation", self.config.timeouts.stall_s, NO_TOKEN):
                    await self.evaluations.finished()
                if self.schedule.is_last_missing:
                    await self.evaluations.measure("eval", self.config.train.steps)
                if self.checkpointer is not None:
                    await self._settled(self.checkpointer)
                for task in loops:
                    task.cancel()
        except ExceptionGroup as errors:
            stages = self.stages.rollouter, self.stages.scorer, self.stages.queue
            with self._waits.on("the last events of the stages", LAST_EVENTS_S):
                await self._events.forward_last(*stages)
            raise first_cause(errors) from errors

    @property
    def is_trained(self) -> bool:
        """Whether the last step is trained; its evaluation may be missing."""
        return self.run_state.step == self.config.train.steps

    @property
    def has_weights(self) -> bool:
        """Whether the trainer has the weights of the run's step: not before it is restored."""
        return self._restored and not self.rewound

    @property
    def state_s(self) -> float:
        """Bound, in seconds, of calls that copy, write or read the trainer's whole state."""
        return 0.0 if self.checkpointer is None else self.checkpointer.timeout_s

    async def checkpoint(self) -> None:
        """Writes a checkpoint of what is trained by now; also after ``run`` has failed.

        Raises if the trainer does not answer, or its state does not match the run state.
        CheckpointError in a cold start, which a resume would skip, and before a restore is over.
        """
        if not (self.has_weights and self._past_cold_start):
            before = "the cold start is not over" if self._restored else "nothing is restored yet"
            cause = "the run is being rewound" if self.rewound else before
            raise CheckpointError("checkpoint", cause)
        self.log_rows()
        if self.checkpointer is not None:
            await self.checkpointer.settled()
            await self.checkpointer.take(self._cut_at_end)
            await self.checkpointer.settled()

    def log_rows(self) -> None:
        """Logs the rows that wait for the pools, which may not answer any more.

        None of a run that is being rewound. GuardrailExceeded: their weights are to be left.
        """
        waiting = [] if self.rewound else [*self._unlogged]
        found = [(report.step, self._log(report, {}, {})) for report in waiting]
        for step, warnings in found:
            self.run_state.guardrail.enforce(step, warnings)

    def _cut_at_end(self, captured: Captured) -> Cut:
        """The cut of a run that ends early, whose trainer may be one step ahead, after its row."""
        # The interrupt has ended the driver's wait for a step that the trainer has done.
        last = captured.report
        if last is not None and last.step == self.run_state.step + 1:
            self.run_state.settle(last)
            self._unlogged.append(last)
            self.log_rows()
        return self.run_state.cut(captured)

    async def _resume(self, start: Checkpoint) -> None:
        """The checkpoint's weights ──► trainer and replicas; unfinished groups ──► prompts."""
        restoring = self.stages.trainer.restore(str(start.folder))
        finished = await self._bounded("the trainer's restart", restoring, self.state_s)
        self._restored = True
        await self._snapshot(start.cut.version, again=True)
        await self._bounded("the first weight sync", self.stages.sync.push())
        # The queue may have the only copy of scored samples (Batcher.hold). After its death all in
        # flight is issued: here, or by ``_reissue`` once ``_issued`` is set, with no await between.
        # Otherwise nothing scored is sampled again. The trainer drops copies of what it has.
        finished = frozenset() if self._queue_restarted else finished
        self._issued = True
        await self.run_state.images.hold_all(self.stages.queue)
        groups = self.run_state.ledger.unfinished_groups(finished)
        supply = self.run_state.supply
        groups += await self._take(supply.free_slots, supply.complete)
        # a task: they may exceed the queue, which has room again only when the training goes on
        self._coroutines.create_task(self._issue(groups))
        if self.schedule.is_missing(start.cut):
            self.evaluations.begin(start.cut.step, self._coroutines)

    async def _first_weights(self) -> None:
        """Trainer ──► replicas, after a cold start or if asked: new ones have the student's own."""
        if self.cold_start is not None:
            await self.cold_start.run(self.stages.trainer, self.stages.scorer, self._bounded)
            self._past_cold_start = True
            if self.checkpointer is not None:
                await self._take_checkpoint(self.checkpointer)
        if self.pushes_first or self.cold_start is not None:
            await self._snapshot(0, again=True)
            await self._bounded("the first weight sync", self.stages.sync.push())

    async def _admit(self) -> None:
        """Prompts ──► the queue, as the staleness budget allows; replicas take what they can."""
        n = self.config.rollout.n
        while True:
            room = await self.run_state.admission.room(n, at_most_groups=64)
            # admitted once their prompts are there: a checkpoint may be taken while they are read
            groups = await self._take(room, partial(self._admitted, room))
            await self._issue(groups, waits=True)

    def _admitted(self, at_most: int) -> list[Group]:
        count = self.run_state.admission.try_admit(self.config.rollout.n, at_most)
        return self.run_state.supply.groups(count)

    async def _take(self, prompts: int, take: Callable[[], list[Group]]) -> list[Group]:
        """The groups that ``take`` makes of so many prompts, at most, which are read before it.

        StageTimeout for a source that hangs; see ``PromptSupply``.
        """
        async with self._taking:  # no other task takes the prompts that were read
            if not self.run_state.supply.has(prompts):
                await self._reading.run(lambda: self.run_state.supply.read(prompts))
            return take()

    async def _reissue(self) -> None:
        """Ledger ──► prompts: samples all unfinished groups again, after the queue was restarted.

        Samples that a stage still works on come twice, and the trainer drops the second copy.
        Before a resumed run has pushed its weights, nothing was issued: ``_resume`` does it then.
        """
        self._queue_restarted = True
        if self._issued:
            await self.run_state.images.hold_all(self.stages.queue)
            await self._issue(self.run_state.ledger.unfinished_groups(()))

    async def _requeue_stale(self) -> None:
        """Trainer ──stale──► prompts: samples that came too late are sampled again."""
        done: int | None = None
        while True:
            lease = await self.stages.queue.get(STALE, at_most=256, ack=done)
            headers = [header for batch in lease.batches for header in batch.headers]
            self.run_state.waste.stale(headers)
            await self._issue(self.run_state.supply.stale(headers))
            done = lease.id

    async def _replace(self) -> None:
        """Rollouter, scorer ──dead──► ledger; replacements take their slots of the budget."""
        done: int | None = None
        while True:
            lease = await self.stages.queue.get(DEAD, at_most=256, ack=done)
            groups: list[Group] = []
            for letter in lease.items(DeadLetter):
                self.run_state.waste.dead += letter.header.tokens
                groups += await self._replacements_for(letter)
            await self._issue(groups)
            done = lease.id

    async def _replacements_for(self, letter: DeadLetter) -> list[Group]:
        """The groups that replace a dead letter; none if the trainer has a copy of its rollout.

        The trainer is asked first: once it has dropped the rollout, no copy of it can be trained.
        """
        supply = self.run_state.supply
        if not (ended := supply.ended_by(letter)):
            return supply.replace(letter)
        if not await self.stages.trainer.drop(ended[0], ended[1:]):
            return []
        return await self._take(1, lambda: supply.replace(letter))

    async def _issue(self, groups: Sequence[Group], waits: bool = False) -> None:
        """Groups ──► prompts, after their images; ``waits`` for room for these."""
        self.log.busy({ADMISSION: admitted(groups, self.metering.clock())})
        await self.run_state.images.put(self.stages.queue, groups, waits)

    async def _train(self) -> None:
        """Scored batches ──► Trainer; a snapshot every ``sync_steps`` steps and after the last."""
        self.metering.start()
        metering: asyncio.Task[None] | None = None
        first, steps = self._step + 1, self.config.train.steps
        for self._step in range(first, steps + 1):
            report = await self._bounded("a batch of scored samples", self.stages.trainer.step())
            self.run_state.settle(report)
            self._unlogged.append(report)
            await self.run_state.images.release(self.stages.queue)
            if self._is_synced:
                with self.metering.timed("sync/trainer_wait_s"):
                    await self._wait_for_push()
                    version = self.run_state.admission.version + 1
                    await self._snapshot(version)
                self._pushing = self._coroutines.create_task(self._push())
            elif self.schedule.is_due(self._step):
                self.evaluations.begin(self._step, self._coroutines)
            if metering is not None:
                await self._metered(metering)  # of the step before: it ran beside this one
            metering = self._coroutines.create_task(self._meter(report))
            await self._checkpoint(metering)
        await self._wait_for_push()
        if metering is not None:
            await self._metered(metering)

    @property
    def _is_synced(self) -> bool:
        """Whether the weights of this step are a version that the engines get."""
        last = self._step == self.config.train.steps
        return last or self._step % self.config.async_.sync_steps == 0

    async def _checkpoint(self, metering: asyncio.Task[None]) -> None:
        """Takes a checkpoint at each step that is due, written while training goes on.

        With ``keep_best`` also of each version that is evaluated. These and the last one wait for
        the one before, which would otherwise make ``take`` skip them. All wait for its row, and so
        do the cuts of versions where a replica's weights may be needed.
        """
        keep_best = self.config.checkpoint.keep_best
        between = self.config.steps_between(self.config.checkpoint)
        replica = self.config.cluster.trainer_recovery == "replica"
        if self.checkpointer is not None and replica and self._is_synced:
            await self._metered(metering)
            self.checkpointer.note(self.run_state.cut(Captured(self._step)))
        if self.checkpointer is None or not (between or keep_best):
            return
        last = self._step == self.config.train.steps
        wanted = last or (keep_best is not None and self.schedule.is_due(self._step))
        if wanted:
            await self._settled(self.checkpointer)
        if wanted or (between and self._step % between == 0):
            await self._metered(metering)
            await self._take_checkpoint(self.checkpointer)

    async def _take_checkpoint(self, checkpointer: Checkpointer) -> None:
        await self._bounded("a checkpoint", checkpointer.take(self.run_state.cut), self.state_s)

    async def _settled(self, checkpointer: Checkpointer) -> None:
        await self._bounded("the checkpoint before", checkpointer.settled(), self.state_s)

    async def _snapshot(self, version: int, again: bool = False) -> None:
        """The trainer's weights ──► a snapshot; on GPUs that engines share, in its turn."""
        config, what = self.config, "the snapshot of the trainer's weights"
        bound_s, until = config.sync.timeout_s, ""
        if config.rollout.host is not None:
            bound_s, until = config.timeouts.stall_s, NO_TOKEN
        with self._waits.on(what, bound_s, until):
            await self.stages.sync.snapshot(version, again)

    async def _push(self) -> None:
        """Snapshot ──► every rollout replica; then admission has the new version's budget."""
        with traced(self.log, "weight sync", "sync"):
            report = await self.stages.sync.push()
        self.run_state.admission.advance(report.version)
        self.metering.synced(report)
        if self.schedule.is_due(step := self.schedule.step_of(report.version)):
            self.evaluations.begin(step, self._coroutines)

    async def _wait_for_push(self) -> None:
        """Waits until the previous push is done: one version at a time is sent."""
        if self._pushing is not None:
            await self._bounded("the weight sync before", self._pushing)
            self._pushing = None

    async def _bound_evaluation(
        self, what: str, work: Awaitable[Result], least_s: float = 0.0, endless: bool = False
    ) -> Result:
        """``_bounded``, with a span of the trace."""
        with traced(self.log, "evaluation", what):
            return await self._bounded(what, work, least_s, endless)

    async def _metered(self, metering: asyncio.Task[None]) -> None:
        """Waits for the row of a step, which has the reports of the pools."""
        with self._waits.on("the reports of the pools", self.config.timeouts.request_s):
            await metering

    async def _meter(self, report: StepReport) -> None:
        last = report.step == self.config.train.steps
        pools, topics = await self.metering.pools(self.stages, last)
        self.log.busy(self.metering.traced(report, pools))
        warnings = self._log(report, pools, topics)
        self.log.waits(self.metering.waits)
        self.run_state.guardrail.enforce(report.step, warnings)

    def _log(
        self, report: StepReport, pools: Mapping[str, StageReport], topics: Mapping[str, TopicStats]
    ) -> list[str]:
        """Logs the row of a step, and its messages; returns the guardrail's warnings."""
        guardrail, before = self.run_state.guardrail, self.run_state.guardrail.state
        metrics = self.metering.step(report, pools, topics)
        warnings = guardrail.observe(metrics)
        metrics |= self.run_state.metrics | (self.checkpointer.metrics if self.checkpointer else {})
        self._unlogged.remove(report)
        try:
            self.log.log(report.step, metrics)
        except StageError as error:
            if error.stage == LOG:  # the file lacks the row; it has it when a callback fails
                self._unlogged.insert(0, report)
                guardrail.state = before
            raise
        for line in report.notes:
            self.log.message(f"trainer: {line}")
        for warning in (*warnings, *self.run_state.episodes.observe(report.trained, metrics)):
            self.log.message(f"step {report.step}: {warning}", "warning")
        return warnings
