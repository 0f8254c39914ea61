"""The whole pipeline in one process on fakes, behind the same Protocols as the Ray proxies."""

from __future__ import annotations

import asyncio
import hashlib
import json
import random
import threading
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from async_opd.config.run_config import RunConfig
from async_opd.core.batch import Batch, unpack
from async_opd.core.errors import NoReplica, NotLeased, StageError, StageTimeout
from async_opd.core.reports import Captured, Events, Progress, StageReport, StepReport, SyncReport
from async_opd.core.row import Media
from async_opd.core.samples import DeadLetter, Header, Prompt, Rollout, Sample, VersionSpan
from async_opd.core.scores import SampledLogprobs
from async_opd.core.stages import DEAD, PROMPTS, SCORED, SamplingSpec, topics
from async_opd.core.written_file import WrittenFile
from async_opd.files.durable import written_file
from async_opd.grading.evaluation import Evaluation
from async_opd.grading.graders import GradeError
from async_opd.media.cache import MediaCache
from async_opd.observability.metric_catalogue import unknown
from async_opd.pipeline import Pipeline
from async_opd.queue.message_queue import MessageQueue
from rollouter.rollout_worker import RolloutWorker
from rollouter.slots import Slots
from rollouter.stage import RollouterStage
from teachers.stage import ScorerStage
from tests.conftest import make_rollout
from tests.properties import examples
from trainer.batcher import Batcher, TrainBatch
from trainer.saving.sample_file import SCORED_FILE, read_scored, write_scored

TEACHERS = ("a", "b")
IMAGE_CACHE = 64
"""Bytes that the cache of a consumer keeps: one image."""


class Pace:
    """Lets other tasks run a random number of times: speeds of the stages, without time."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    async def wait(self) -> None:
        for _ in range(self._random.randint(0, 12)):
            await asyncio.sleep(0)


class PacedReads:
    """Prompts are read after a while and handed over after a while, by no thread."""

    def __init__(self, pace: Pace) -> None:
        self.pace = pace

    async def run(self, work: Callable[[], Any]) -> Any:
        await self.pace.wait()
        found = work()
        await self.pace.wait()
        return found


class FakeStudent:
    """The real worker, and no engine."""

    def __init__(self, name: str, queue: MessageQueue, n: int, pace: Pace) -> None:
        self.name = self.consumer = name
        self.version = 0
        self.pace = pace
        self.worker = RolloutWorker(name, queue, Slots(4, n), self._sample)
        self.media = MediaCache(queue.media, IMAGE_CACHE)
        self.fail_at: int | None = None
        self.started: list[tuple[str, int]] = []
        self.tokens = 0

    async def run(self) -> None:
        await self.worker.run()

    async def alive(self) -> None: ...
    async def stop(self) -> None: ...

    async def _sample(self, prompt: Prompt, uid: str) -> Rollout:
        if self.fail_at is not None and len(self.started) >= self.fail_at:
            raise StageError(self.name, "its process died")
        self.started.append((uid, self.version))
        version = self.version
        await self.pace.wait()
        await seen(self.media, prompt, uid)
        return self._rollout(prompt, int(uid.rpartition("/")[2]), version)

    def _rollout(self, prompt: Prompt, index: int, version: int) -> Rollout:
        spans = (VersionSpan(version, 0, 2), VersionSpan(self.version, 2, 4))
        if version == self.version:
            spans = (VersionSpan(version, 0, 4),)  # type: ignore[assignment]
        ids = np.arange(4, dtype=np.int32)
        logprobs = np.zeros(4, dtype=np.float32)
        return Rollout.plain(f"{prompt.uid}/{index}", prompt, ids, logprobs, spans, "stop")

    async def progress(self) -> Progress:
        return Progress(self.tokens)

    async def generate(self, prompts: Sequence[Prompt], sampling: SamplingSpec) -> list[Rollout]:
        version = self.version
        await self.pace.wait()
        for prompt in prompts:
            await self.media.get(prompt.media, of=prompt.uid)
        indices = range(sampling.n)
        return [self._rollout(prompt, index, version) for prompt in prompts for index in indices]

    async def report(self) -> StageReport:
        return StageReport(gauges={"version": float(self.version)})


class MortalQueue:
    """The real queue, which can die: calls break off and are made again, as ``QueueProxy`` does."""

    def __init__(self, build: Callable[[], MessageQueue]) -> None:
        self._build = build
        self._queue, self._death = build(), asyncio.Event()
        self.reissue = asyncio.Event()
        """Supervision is to issue everything in flight again."""

    def die(self) -> None:
        self._death.set()
        self._queue, self._death = self._build(), asyncio.Event()
        self.reissue.set()

    def __getattr__(self, name: str) -> Any:
        async def call(*args: Any, **named: Any) -> Any:
            while True:
                end = asyncio.create_task(self._death.wait())
                work = asyncio.create_task(getattr(self._queue, name)(*args, **named))
                try:
                    await asyncio.wait({end, work}, return_when=asyncio.FIRST_COMPLETED)
                    if not end.done():
                        return await work
                finally:
                    end.cancel()
                    work.cancel()

        return call


class FakeTeacher:
    def __init__(self, pace: Pace, queue: Any) -> None:
        self.pace = pace
        self.media = MediaCache(queue.media, IMAGE_CACHE)
        self.fail = False
        self.poison: set[str] = set()

    async def score(self, batch: Batch) -> Batch:
        await self.pace.wait()
        if self.fail:
            raise StageError("teacher a/0", "its process died")
        if bad := self.poison & {header.uid for header in batch.headers}:
            raise StageError("teacher a/0", f"cannot score {bad}")
        rollouts = [rollout for rollout in batch.unpack() if isinstance(rollout, Rollout)]
        for rollout in rollouts:
            await seen(self.media, rollout.prompt, rollout.uid)
        return Batch.pack(Sample(one, SampledLogprobs(one.rollout_logprobs)) for one in rollouts)

    async def generate(self, prompts: Sequence[Prompt], sampling: SamplingSpec) -> list[Rollout]:
        return []

    async def ready(self) -> int:
        if self.fail:
            raise StageError("teacher a/0", "its process died")
        return 1

    async def report(self) -> StageReport:
        return StageReport()


class FakeTrainer:
    """The real batcher, and no learner."""

    def __init__(self, batcher: Batcher, pace: Pace) -> None:
        self.batcher, self.pace = batcher, pace
        self.media = MediaCache(batcher.queue.media, IMAGE_CACHE)
        self.version = self.steps = 0
        self.staleness: list[int] = []
        self.metrics = {"loss/total": 1.0}
        self.trained: list[tuple[str, int]] = []
        self.hang = False
        self.last: StepReport | None = None
        self.lr_factor = 1.0
        self.state: tuple[int, int, asyncio.Task[tuple[Sample, ...]]]

    async def step(self) -> StepReport:
        if self.hang:
            await asyncio.Event().wait()
        taken, samples = await self._take()
        await self.pace.wait()
        for sample in samples:
            await seen(self.media, sample.rollout.prompt, sample.rollout.uid)
        staleness = tuple(header.staleness(self.version) for header in taken.headers)
        self.staleness += staleness
        self.trained += [(sample.rollout.uid, self.version) for sample in samples]
        self.steps += 1
        done = StepReport(self.steps, taken.headers, staleness, self.metrics, taken.requeued)
        self.last = done
        await self.batcher.done()
        return done

    async def _take(self) -> tuple[TrainBatch, Sequence[Sample]]:
        """A batch and its samples; those of leased headers are fetched, as several ranks do."""
        while not self.batcher.payloads:
            batch = await self.batcher.choose(lambda: self.version)
            leased: defaultdict[int, list[str]] = defaultdict(list)
            for header, lease in zip(batch.headers, batch.leases, strict=True):
                leased[lease].append(header.uid)
            try:
                fetched = await self.batcher.queue.fetch(SCORED, leased)
            except NotLeased as error:
                lost = {lease for lease, uids in leased.items() if {*uids} & {*error.uids}}
                await self.batcher.forget(lost)
                continue
            if self.batcher.commit(batch, self.version):
                found = {sample.rollout.uid: sample for sample in unpack(Sample, [fetched])}
                return batch, [found[header.uid] for header in batch.headers]
        taken = await self.batcher.take(self.version)
        return taken, taken.samples

    async def save(self, directory: str) -> None: ...

    async def scale_learning_rate(self, factor: float) -> None:
        self.lr_factor = factor

    async def progress(self) -> Progress:
        return Progress(0)

    async def drop(self, lost: str, others: Sequence[str] = ()) -> bool:
        return await self.batcher.drop(lost, others)

    async def capture(self) -> Captured:
        self.state = (self.steps, self.version, self.batcher.copy_held())
        return Captured(self.steps, self.last)

    async def checkpoint(self, directory: str, in_flight: frozenset[str]) -> dict[str, WrittenFile]:
        steps, version, held = self.state
        await self.pace.wait()
        queued = [one async for part in self.batcher.queued(in_flight) for one in part]
        found = {s.rollout.uid: s for s in (*queued, *await held) if s.rollout.uid in in_flight}
        (Path(directory) / "trainer.json").write_text(json.dumps([steps, version]))
        await self.pace.wait()
        scored = write_scored(Path(directory), list(found.values()))
        await self.pace.wait()
        return {
            "trainer.json": written_file(Path(directory) / "trainer.json"),
            SCORED_FILE: scored,
        }

    async def restore(self, directory: str) -> frozenset[str]:
        await self.pace.wait()
        self.steps, self.version = json.loads((Path(directory) / "trainer.json").read_text())
        samples = read_scored(Path(directory))
        self.batcher.hold(samples)
        await self.pace.wait()
        return frozenset(sample.rollout.uid for sample in samples)

    async def report(self) -> StageReport:
        return StageReport()


class FakeSync:
    def __init__(self, trainer: FakeTrainer, students: list[FakeStudent], pace: Pace) -> None:
        self.trainer, self.students, self.pace = trainer, students, pace
        self.fail = False

    async def snapshot(self, version: int, again: bool = False) -> None:
        self.trainer.version = version

    async def push(self) -> SyncReport:
        await self.pace.wait()
        if self.fail:
            raise StageError("weight sync", "the broadcast failed")
        for student in self.students:
            student.version = self.trainer.version
        return SyncReport(self.trainer.version, {"sync/seconds": 0.1})


@dataclass
class FakeLog:
    steps: list[int] = field(default_factory=list)
    evaluated: list[int] = field(default_factory=list)
    summary: dict[str, float] = field(default_factory=dict)
    last: dict[str, float] = field(default_factory=dict)
    keys: set[str] = field(default_factory=set)
    dead: list[str] = field(default_factory=list)
    told: list[str] = field(default_factory=list)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self.steps.append(step)
        if any(key.startswith("eval") for key in metrics):
            self.evaluated.append(step)
        self.last = dict(metrics)
        self.keys |= metrics.keys()

    def summarize(self, metrics: Mapping[str, float]) -> None:
        self.keys |= metrics.keys()
        self.summary |= metrics

    def waits(self, waits: Mapping[str, str]) -> None: ...
    def busy(self, pools: Mapping[str, Any]) -> None: ...

    def message(self, text: str, level: str = "info") -> None:
        self.told.append(text)

    def dead_letter(self, lost: DeadLetter) -> None:
        self.dead.append(lost.header.uid)


async def seen(cache: MediaCache, prompt: Prompt, uid: str) -> None:
    """What an engine or a rank does with the images of a prompt; a message has none of them."""
    assert not prompt.encoded
    got = await cache.get(prompt.media, of=uid)
    assert [hashlib.sha256(one).hexdigest() for one in got] == [m.sha256 for m in prompt.media]


class FakePrompts:
    """Every third prompt has no image, the others one or two; some have the same as another."""

    def __init__(self, cursor: int = 0) -> None:
        self.cursor = cursor

    def next(self, count: int) -> list[Prompt]:
        first, self.cursor = self.cursor, self.cursor + count
        return [self.find(f"p{number}") for number in range(first, self.cursor)]

    def read_ahead(self) -> None: ...

    @property
    def metrics(self) -> dict[str, float]:
        return {}

    def find(self, uid: str) -> Prompt:
        number = int(uid[1:])
        teacher = TEACHERS[number % 2]
        encoded = [bytes([one % 8]) * 64 for one in range(number, number + number % 3)]
        media = tuple(Media(hashlib.sha256(one).hexdigest(), 64, 8, 8) for one in encoded)
        by_hash = {m.sha256: one for m, one in zip(media, encoded, strict=True)}
        ids = np.zeros(2, np.int32)
        return Prompt(uid, teacher, teacher, ids, media=media, encoded=by_hash)


@dataclass
class World:
    """Everything a run on fakes consists of."""

    pipeline: Pipeline
    students: list[FakeStudent]
    teachers: dict[str, FakeTeacher]
    trainer: FakeTrainer
    sync: FakeSync
    queue: MortalQueue
    log: FakeLog
    rollouter: RollouterStage
    scorer: ScorerStage
    pace: Pace


def world(
    seed: int = 0,
    *,
    steps: int = 6,
    batch_size: int = 4,
    n: int = 2,
    s: float = 0.5,
    k: int = 2,
    replicas: int = 2,
    stall_s: float = 30.0,
    evaluation: Evaluation | None = None,
    max_lag: int | None = None,
    groups: bool = False,
    pace: Pace | None = None,
    guardrail: dict[str, Any] | None = None,
    share: float = 0.01,
    life_s: float = 60.0,
    before: bool = True,
    payloads: bool = True,
) -> World:
    """``payloads`` False: the trainer leases headers, as the first of several ranks does."""
    config = RunConfig.model_validate(
        {
            "student": {"model": "student"},
            "teachers": {
                name: {"model": name, "max_dead_letter_share": share} for name in TEACHERS
            },
            "data": {"train": "prompts.jsonl"},
            "rollout": {"n": n},
            "train": {"steps": steps, "batch_size": batch_size},
            "async": {"staleness_threshold": s, "sync_steps": k},
            "eval": {"every": 1, "teachers": False, "before": before},
            "timeouts": {"stall_s": stall_s},
            "supervision": {"timeout_s": life_s},
            "guardrail": guardrail or {},
            "log": {"pools_every_s": 0},
            "reward": {} if groups else None,
        }
    )
    pace = pace or Pace(seed)
    queue: Any = MortalQueue(
        lambda: MessageQueue(topics(TEACHERS), 64, 1 << 20, 60.0, kept=(PROMPTS,))
    )
    students = [FakeStudent(f"student/{i}", queue, n, pace) for i in range(replicas)]
    teachers = {name: FakeTeacher(pace, queue) for name in TEACHERS}
    batcher = Batcher(
        queue,
        batch_size=batch_size,
        max_version_lag=max_lag,
        group_size=n if groups else 1,
        payloads=payloads,
    )
    trainer = FakeTrainer(batcher, pace)
    sync = FakeSync(trainer, students, pace)
    rollouter = RollouterStage({student.name: student for student in students}, queue)
    scorer = ScorerStage(
        {name: [teacher] for name, teacher in teachers.items()}, queue, dict.fromkeys(TEACHERS, 8)
    )
    log = FakeLog()
    parts: Any = type("Parts", (), {})()
    parts.queue, parts.rollouter, parts.scorer = queue, rollouter, scorer
    parts.trainer, parts.sync = trainer, sync

    async def supervise(
        reissue: Callable[[], Coroutine[Any, Any, None]], step: Callable[[], int]
    ) -> None:
        while True:
            await queue.reissue.wait()
            queue.reissue.clear()
            await reissue()

    parts.supervise = supervise
    reads: Any = PacedReads(pace)
    pipeline = Pipeline(config, parts, FakePrompts(), evaluation, log, reading=reads)
    return World(pipeline, students, teachers, trainer, sync, queue, log, rollouter, scorer, pace)


async def test_a_run_trains_every_step_and_then_ends() -> None:
    run = world()
    await run.pipeline.run()
    assert run.trainer.steps == 6


async def test_every_admitted_sample_is_trained_when_the_run_ends() -> None:
    run = world()
    await run.pipeline.run()
    assert run.pipeline.run_state.ledger.counts == {
        "in_flight": 0,
        "trained": 24,
        "dead_lettered": 0,
        "requeued": 0,
    }


async def test_images_are_held_while_prompts_are_in_flight_and_none_when_the_run_has_ended() -> (
    None
):
    run = world()
    await run.pipeline.run()
    stats = await run.queue.media_stats()
    assert stats.added_bytes > 0
    assert (stats.images, stats.nbytes) == (0, 0)
    assert run.pipeline.run_state.images.held_bytes == 0


async def test_an_image_is_put_once_for_all_rollouts_of_its_prompt() -> None:
    run = world(steps=1, batch_size=4, n=4, s=0.0, k=1)  # p0 has no image, p1 has one
    keep, put = run.queue.keep_media, list[str]()

    async def counted(owned: Any, complete: bool = False, encoded: Any = None) -> Any:
        put.extend(encoded or ())
        return await keep(owned, complete, encoded)

    run.queue.keep_media = counted
    run.pipeline.prompts.next(1)
    await run.pipeline.run()
    assert put == [FakePrompts().find("p1").media[0].sha256]


class SlowDisk:
    """A checkpointer that has written a checkpoint only when it is waited for."""

    timeout_s = 20.0

    def __init__(self, run: World) -> None:
        self.run, self.metrics = run, dict[str, float]()
        self.writing = False
        self.taken: list[int] = []

    async def take(self, cut_of: Callable[[Captured], Any]) -> None:
        if not self.writing:
            self.taken.append(cut_of(await self.run.trainer.capture()).version)
        self.writing = True

    async def settled(self) -> None:
        self.writing = False

    async def evaluated(self, step: int, measured: Any) -> None: ...


async def test_every_evaluated_version_has_a_checkpoint_however_slow_the_disk_is() -> None:
    run = world(steps=6, k=1)
    config = run.pipeline.config
    kept = config.checkpoint.model_copy(update={"keep_best": "eval/a/accuracy", "every": 1})
    evaluated = config.eval.model_copy(update={"every": 2})
    run.pipeline.config = config.model_copy(update={"checkpoint": kept, "eval": evaluated})
    slow: Any = SlowDisk(run)
    run.pipeline.checkpointer = slow
    run.pipeline.__post_init__()
    await run.pipeline.run()
    assert slow.taken == [1, 2, 4, 6]


async def test_the_last_weights_reach_the_replicas() -> None:
    run = world(steps=5, k=2)
    await run.pipeline.run()
    assert [student.version for student in run.students] == [3, 3]


async def test_the_last_replica_that_dies_ends_the_run_with_its_name() -> None:
    run = world(replicas=1)
    run.students[0].fail_at = 3
    with pytest.raises(StageError, match="student/0: its process died"):
        await asyncio.wait_for(run.pipeline.run(), 5)


async def test_a_teacher_that_dies_ends_the_run_with_its_name() -> None:
    run = world()
    run.teachers["a"].fail = True
    with pytest.raises(NoReplica, match=r"teacher a: all 1 replicas are gone.* its process died"):
        await asyncio.wait_for(run.pipeline.run(), 5)


@pytest.mark.parametrize("seed", range(4))
async def test_the_last_news_of_a_teacher_is_told_before_its_error_ends_the_run(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = world(seed)
    run.teachers["a"].fail = True
    news = run.scorer.events

    async def slow(seen: int, wait: bool = True) -> Events:
        """The error overtakes the answer, as between processes."""
        answer = await news(seen, wait)
        for _ in range(20):
            await asyncio.sleep(0)
        return answer

    monkeypatch.setattr(run.scorer, "events", slow)
    with pytest.raises(NoReplica):
        await asyncio.wait_for(run.pipeline.run(), 5)
    told = [line.partition(":")[0] for line in run.log.told if line.startswith("teacher")]
    assert told == ["teacher a/0 is ejected", "teacher a/0 is gone for good"]


@pytest.mark.parametrize("hangs", [False, True])
async def test_a_rollouter_that_is_gone_hides_no_last_events_of_the_scorer(
    hangs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("async_opd.observability.event_forwarder.LAST_EVENTS_S", 0.01)
    run = world()
    run.teachers["a"].fail = True
    events = run.scorer.events

    async def gone(seen: int, wait: bool = True) -> Events:
        if wait or hangs:
            await asyncio.get_running_loop().create_future()
        raise StageError("rollouter", "its process died")

    async def only_when_asked(seen: int, wait: bool = True) -> Events:
        if wait:
            await asyncio.get_running_loop().create_future()
        return await events(seen, wait)

    monkeypatch.setattr(run.rollouter, "events", gone)
    monkeypatch.setattr(run.scorer, "events", only_when_asked)
    with pytest.raises(NoReplica):
        await asyncio.wait_for(run.pipeline.run(), 5)
    assert any(line.startswith("teacher a/0 is gone for good") for line in run.log.told)


async def test_a_scorer_that_does_not_answer_holds_up_no_failing_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("async_opd.observability.event_forwarder.LAST_EVENTS_S", 0.01)
    run = world(replicas=1)
    run.students[0].fail_at = 3

    async def never(seen: int, wait: bool = True) -> Events:
        return await asyncio.get_running_loop().create_future()

    monkeypatch.setattr(run.scorer, "events", never)
    with pytest.raises(StageError, match="student/0: its process died"):
        await asyncio.wait_for(run.pipeline.run(), 5)


async def test_a_rollout_that_no_teacher_can_score_is_replaced_and_recorded() -> None:
    run = world()
    run.teachers["a"].poison = {"p0/0", "p4/1"}
    await asyncio.wait_for(run.pipeline.run(), 5)
    counts = run.pipeline.run_state.ledger.counts
    assert sorted(run.log.dead) == ["p0/0", "p4/1"]
    assert (counts["trained"], counts["dead_lettered"], counts["in_flight"]) == (24, 2, 0)


async def test_with_a_reward_what_cannot_be_scored_is_sampled_again() -> None:
    run = world(groups=True)
    score, failed = run.teachers["a"].score, []

    async def fails_for_a_while(batch: Batch) -> Batch:
        if any(header.uid == "p0/0" for header in batch.headers) and len(failed) < 4:
            failed.append(1)
            raise StageError("teacher a/0", "cannot score")
        return await score(batch)

    run.teachers["a"].score = fails_for_a_while  # type: ignore[method-assign]
    await asyncio.wait_for(run.pipeline.run(), 5)
    assert (run.log.dead, run.pipeline.run_state.ledger.counts["requeued"]) == ([], 1)
    assert_each_trained_once(run, 6)


async def test_with_a_reward_a_group_that_cannot_be_completed_is_replaced_by_another() -> None:
    run = world(groups=True)
    run.teachers["a"].poison = {"p0/0"}
    await asyncio.wait_for(run.pipeline.run(), 5)
    assert sorted(run.log.dead) == ["p0/0", "p0/1"]
    assert not {"p0/0", "p0/1"} & {uid for uid, _ in run.trainer.trained}
    assert_each_trained_once(run, 6)
    assert run.trainer.batcher._held == {}


async def test_rollouts_that_cannot_be_graded_are_replaced_and_recorded() -> None:
    run = world()

    async def grade(rollout: Rollout) -> Rollout:
        if rollout.uid in ("p0/0", "p3/1"):
            raise GradeError("grader", f"rollout {rollout.uid}: it raised")
        return rollout

    for student in run.students:
        student.worker._grade = grade
    await asyncio.wait_for(run.pipeline.run(), 5)
    assert sorted(run.log.dead) == ["p0/0", "p3/1"]
    assert run.log.last["dead_letters/grader"] == 2
    assert_each_trained_once(run, 6)


async def test_a_grader_that_always_fails_ends_the_run_with_its_reason() -> None:
    run = world(groups=True)

    async def grade(rollout: Rollout) -> Rollout:
        raise GradeError("grader", f"rollout {rollout.uid}: it raised")

    for student in run.students:
        student.worker._grade = grade
    with pytest.raises(StageError, match=r"11 rollouts of teacher . are dead letters.* it raised"):
        await asyncio.wait_for(run.pipeline.run(), 5)


async def test_a_step_that_was_left_out_is_counted_and_its_samples_are_dead_letters() -> None:
    run = world(share=0.0)
    step = run.trainer.step

    async def third_is_left_out() -> StepReport:
        report = await step()
        return replace(report, skipped="loss nan") if report.step == 3 else report

    run.trainer.step = third_is_left_out  # type: ignore[method-assign]
    await asyncio.wait_for(run.pipeline.run(), 5)
    counts = run.pipeline.run_state.ledger.counts
    assert (counts["trained"], counts["dead_lettered"], counts["in_flight"]) == (20, 4, 0)
    assert len(run.log.dead) == 4


async def test_what_the_trainer_notes_is_in_the_runs_log() -> None:
    run = world()
    step = run.trainer.step

    async def noted() -> StepReport:
        report = await step()
        return replace(report, notes=("it runs eagerly",)) if report.step == 2 else report

    run.trainer.step = noted  # type: ignore[method-assign]
    await asyncio.wait_for(run.pipeline.run(), 5)
    assert run.log.told.count("trainer: it runs eagerly") == 1


async def test_too_many_dead_letters_end_the_run_with_the_arithmetic_and_the_reason() -> None:
    run = world(share=0.001)
    run.teachers["a"].poison = {f"p{index}/0" for index in range(0, 100, 2)}
    expected = r"2 rollouts of teacher a are .* allowed are 1 \(0.001 of 1000\).* cannot score"
    with pytest.raises(StageError, match=expected):
        await asyncio.wait_for(run.pipeline.run(), 5)


async def test_a_failing_weight_sync_ends_the_run_although_everybody_waits_for_it() -> None:
    run = world(s=0.0)
    run.sync.fail = True
    with pytest.raises(StageError, match="the broadcast failed"):
        await asyncio.wait_for(run.pipeline.run(), 5)


async def test_a_stage_loop_that_ends_is_an_error_with_a_name() -> None:
    run = world()

    async def ends() -> None: ...

    run.scorer.run = ends  # type: ignore[method-assign]
    with pytest.raises(StageError, match="scorer: its loop ended"):
        await asyncio.wait_for(run.pipeline.run(), 5)


async def test_a_run_that_makes_no_step_ends_by_its_stall_bound() -> None:
    run = world(stall_s=0.01)
    run.trainer.hang = True
    with pytest.raises(StageTimeout, match="a batch of scored samples"):
        await asyncio.wait_for(run.pipeline.run(), 5)


async def test_a_run_whose_replicas_generate_is_no_stall() -> None:
    run = world(stall_s=0.04)
    step, student = run.trainer.step, run.students[0]
    progress, long = student.progress, asyncio.Event()

    async def generates() -> Progress:
        student.tokens += 8
        if student.tokens == 12 * 8:  # three times as long as the bound
            long.set()
        return await progress()

    async def slowly() -> StepReport:
        await long.wait()
        return await step()

    student.progress = generates  # type: ignore[method-assign]
    run.trainer.step = slowly  # type: ignore[method-assign]
    await asyncio.wait_for(run.pipeline.run(), 10)
    assert run.trainer.steps == 6


async def test_a_cancelled_run_leaves_no_task_behind() -> None:
    run = world()
    run.trainer.hang = True
    task = asyncio.create_task(run.pipeline.run())
    await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await asyncio.sleep(0)
    assert [t for t in asyncio.all_tasks() if t is not asyncio.current_task()] == []


async def test_responses_that_run_away_end_the_run_if_the_config_says_so() -> None:
    run = world(guardrail={"mode": "stop", "window": 1})
    run.trainer.metrics = {
        "train/mean_response_tokens": 4.0,
        "train/truncated_share": 0.9,
        "train/repetition": 0.0,
    }
    with pytest.raises(StageError, match=r"guardrail: step 1: 90% of the responses are cut off"):
        await asyncio.wait_for(run.pipeline.run(), 5)


async def test_accuracy_is_measured_before_during_and_after() -> None:
    prompts = tuple(FakePrompts().next(4))
    graded: list[str] = []

    async def grade(rollout: Rollout) -> float:
        graded.append(rollout.uid)
        return 1.0

    evaluation = Evaluation(prompts, SamplingSpec(4, 0.0, 1.0, 1), grade)
    run = world(steps=4, k=1, evaluation=evaluation)
    await run.pipeline.run()
    before, first, *_, after = run.log.evaluated  # a version that is due meanwhile has none
    assert (before, first, after) == (0, 1, 4)
    assert len(graded) == 4 * len(run.log.evaluated)


async def test_an_evaluation_belongs_to_the_step_of_the_version_that_it_measured() -> None:
    """Training goes on while it is graded, and no weight sync waits for it."""
    synced: list[int] = []

    async def grade(rollout: Rollout) -> float:
        while run.trainer.version and run.students[0].version < 3:
            await turns(1)
        synced.append(run.students[0].version)
        return 1.0

    run = evaluated_world(grade)
    await asyncio.wait_for(run.pipeline.run(), 20)
    assert synced[4] == 3
    assert run.log.evaluated[:2] == [0, 2]


async def test_a_version_that_is_due_during_an_evaluation_has_none_and_that_is_said() -> None:
    async def grade(rollout: Rollout) -> float:
        while 0 < run.trainer.steps < 8:
            await turns(1)
        return 1.0

    run = evaluated_world(grade)
    await asyncio.wait_for(run.pipeline.run(), 20)
    assert run.log.evaluated == [0, 2, 8]
    skipped = [line.split(":")[0] for line in run.log.told if "no evaluation" in line]
    assert skipped == ["step 4", "step 6"]


async def test_an_evaluation_belongs_to_the_oldest_version_of_its_answers() -> None:
    """All of its requests waited while the next version was pushed."""
    run = evaluated_world(right)
    generate = run.rollouter.generate

    async def late(*asked: Any) -> list[Rollout]:
        while run.trainer.version and run.pipeline.run_state.admission.version < 2:
            await turns(1)
        return await generate(*asked)

    run.rollouter.generate = late  # type: ignore[method-assign]
    await asyncio.wait_for(run.pipeline.run(), 20)
    assert run.log.evaluated[:2] == [0, 4]


async def test_an_evaluation_that_is_cancelled_writes_no_file_afterwards() -> None:
    begun, go_on, ended = threading.Event(), threading.Event(), threading.Event()

    def record(name: str, result: Any) -> None:
        begun.set()
        assert go_on.wait(20)
        ended.set()

    run = evaluated_world(right)
    assert run.pipeline.evaluation is not None
    run.pipeline.evaluation = replace(run.pipeline.evaluation, record=record)
    run.pipeline.__post_init__()
    work = asyncio.create_task(run.pipeline.run())
    await asyncio.to_thread(begun.wait, 20)
    work.cancel()
    asyncio.get_running_loop().call_later(0.05, go_on.set)
    await asyncio.wait({work})
    assert ended.is_set()


async def test_an_evaluation_by_replicas_that_have_later_weights_belongs_to_these() -> None:
    """Replicas of its own may get the weights of a sync that is still under way for the others."""
    run = evaluated_world(right)
    generate = run.rollouter.generate

    async def ahead(*asked: Any) -> list[Rollout]:
        version = run.pipeline.run_state.admission.version
        found = await generate(*asked)
        later = (VersionSpan(2, 0, 4),)
        return [replace(one, version_spans=later) for one in found] if version == 1 else found

    run.rollouter.generate = ahead  # type: ignore[method-assign]
    await asyncio.wait_for(run.pipeline.run(), 20)
    assert run.log.evaluated[:2] == [0, 4]


async def test_a_version_that_is_measured_before_its_push_ends_is_not_evaluated_again() -> None:
    run = evaluated_world(right)
    generate, push = run.rollouter.generate, run.sync.push

    async def ahead(*asked: Any) -> list[Rollout]:
        """The replicas of evaluations have the newest snapshot."""
        while run.pipeline.run_state.admission.version == 1 == run.trainer.version:
            await turns(1)
        later = (VersionSpan(run.trainer.version, 0, 4),)
        return [replace(one, version_spans=later) for one in await generate(*asked)]

    async def slow() -> SyncReport:
        while run.trainer.version == 2 and 4 not in run.log.evaluated:
            await turns(1)
        return await push()

    run.rollouter.generate = ahead  # type: ignore[method-assign]
    run.sync.push = slow  # type: ignore[method-assign]
    await asyncio.wait_for(run.pipeline.run(), 20)
    assert run.log.evaluated[:2] == [0, 4]
    assert run.log.evaluated == sorted(set(run.log.evaluated))
    named = [line for line in run.log.told if "no evaluation" in line]
    why = "its engines had the weights after step 4 by then"
    assert named[0] == f"step 2: no evaluation, since {why}"


async def test_the_checkpointer_knows_which_step_is_being_evaluated() -> None:
    asked: list[int | None] = []

    async def grade(rollout: Rollout) -> float:
        asked.append(disk.evaluating())
        return 1.0

    run = evaluated_world(grade)
    disk: Any = SlowDisk(run)
    run.pipeline.checkpointer = disk
    run.pipeline.__post_init__()
    await asyncio.wait_for(run.pipeline.run(), 20)
    assert asked[::4][:2] == [0, 2]
    assert disk.evaluating() is None


async def test_an_evaluation_whose_answers_are_of_several_versions_names_them() -> None:
    run = evaluated_world(right)
    answer = run.students[0].generate

    async def slow(prompts: Sequence[Prompt], sampling: SamplingSpec) -> list[Rollout]:
        version = run.students[0].version
        found = await answer(prompts, sampling)
        while version == 1 == run.students[0].version:
            await turns(1)
        spans = (VersionSpan(version, 0, 2), VersionSpan(run.students[0].version, 2, 4))
        return [replace(one, version_spans=spans) for one in found]

    run.students[0].generate = slow  # type: ignore[method-assign]
    await asyncio.wait_for(run.pipeline.run(), 20)
    assert any(line.startswith("step 2, versions 1 to 2: eval/a 100.0%") for line in run.log.told)


async def test_a_queue_that_dies_during_an_evaluation_gets_its_images_again() -> None:
    """Before training of the student and the teachers, and beside it."""
    run = evaluated_world(right)
    evaluation = run.pipeline.evaluation
    assert evaluation is not None
    run.pipeline.evaluation = replace(evaluation, prompts=tuple(map(pictured, range(4))))
    config = run.pipeline.config
    evaluated = config.eval.model_copy(update={"teachers": True})
    run.pipeline.config = config.model_copy(update={"eval": evaluated})
    run.pipeline.__post_init__()
    (student,), deaths = run.students, []
    answer = student.generate

    async def struck(prompts: Sequence[Prompt], sampling: SamplingSpec) -> list[Rollout]:
        run.queue.die()
        deaths.append(run.trainer.steps)
        await turns(100)  # supervision has issued all again
        return await answer(prompts, sampling)

    for replica in (student, *run.teachers.values()):
        replica.generate = struck  # type: ignore[method-assign]
    await asyncio.wait_for(run.pipeline.run(), 20)
    assert {"eval_initial/a/accuracy", "eval/b/accuracy"} <= run.log.summary.keys()
    assert "eval_teacher/a/accuracy" in run.log.keys
    assert deaths[:3] == [0, 0, 0]
    assert any(0 < steps < 8 for steps in deaths)
    assert (await run.queue.media_stats()).images == 0


def pictured(number: int) -> Prompt:
    """A prompt whose image no other prompt has."""
    encoded = bytes([100 + number]) * 64
    media = Media(hashlib.sha256(encoded).hexdigest(), 64, 8, 8)
    prompt = FakePrompts().find(f"p{number}")
    return replace(prompt, uid=f"e{number}", media=(media,), encoded={media.sha256: encoded})


async def right(rollout: Rollout) -> float:
    return 1.0


def evaluated_world(grade: Callable[[Rollout], Awaitable[float]]) -> World:
    prompts = tuple(FakePrompts().next(4))
    evaluation = Evaluation(prompts, SamplingSpec(4, 0.0, 1.0, 1), grade)
    return world(steps=8, k=2, s=2.0, replicas=1, evaluation=evaluation)


@pytest.mark.parametrize("before", [True, False])
async def test_the_summary_has_accuracy_before_and_after(before: bool) -> None:
    async def grade(rollout: Rollout) -> float:
        return 0.5

    evaluation = Evaluation(tuple(FakePrompts().next(4)), SamplingSpec(4, 0.0, 1.0, 1), grade)
    run = world(evaluation=evaluation, before=before)
    await run.pipeline.run()
    assert run.log.summary.get("eval_initial/a/accuracy") == (0.5 if before else None)
    assert run.log.summary["eval/b/accuracy"] == 0.5


async def test_every_metric_of_a_run_is_in_the_catalogue() -> None:
    async def grade(rollout: Rollout) -> float:
        return 0.5

    evaluation = Evaluation(tuple(FakePrompts().next(4)), SamplingSpec(4, 0.0, 1.0, 1), grade)
    run = world(evaluation=evaluation, max_lag=0)
    run.teachers["a"].poison = {"p0/0"}
    await asyncio.wait_for(run.pipeline.run(), 5)
    assert {"loss/total", "teacher/a/busy", "eval/a/accuracy"} <= run.log.keys
    assert unknown(run.log.keys) == []


async def test_on_policy_means_that_every_token_of_a_batch_is_of_its_version() -> None:
    run = world(s=0.0, k=1)
    await run.pipeline.run()
    versions = dict(started for student in run.students for started in student.started)
    assert all(versions[uid] == version for uid, version in run.trainer.trained)


class Straggling(Pace):
    """Most work takes a moment; now and then some takes longer than several weight versions."""

    async def wait(self) -> None:
        long = self._random.random() < 0.1
        for _ in range(self._random.randint(0, 400 if long else 6)):
            await asyncio.sleep(0)


shapes = {
    "seed": st.integers(0, 10**6),
    "s": st.sampled_from([0.0, 0.3, 0.5, 1.0, 2.5]),
    "k": st.integers(1, 3),
    "n": st.sampled_from([1, 2, 4]),
    "replicas": st.integers(1, 3),
    "steps": st.integers(1, 7),
    "payloads": st.booleans(),
}


def finished(**shape: Any) -> World:
    """A world whose run has ended."""

    async def run() -> World:
        made = world(**shape)
        await asyncio.wait_for(made.pipeline.run(), 20)
        return made

    return asyncio.run(run())


def assert_each_trained_once(made: World, steps: int) -> None:
    counts = Counter(uid for uid, _ in made.trainer.trained)
    assert len(counts) == steps * 4
    assert set(counts.values()) == {1}


@examples(60)
@given(**shapes)
def test_at_any_speed_each_sample_is_trained_once_and_the_budget_holds(**shape: Any) -> None:
    made = finished(**shape)
    assert_each_trained_once(made, shape["steps"])
    started = sorted(version for student in made.students for _, version in student.started)
    for version in set(started):
        allowed = (version + 1 + shape["s"]) * shape["k"] * 4
        assert sum(v <= version for v in started) <= allowed


@examples(40)
@given(**shapes, max_lag=st.integers(0, 2))
def test_whatever_straggles_no_sample_is_trained_beyond_the_hard_bound(
    max_lag: int, **shape: Any
) -> None:
    made = finished(**shape, max_lag=max_lag, pace=Straggling(shape["seed"]))
    assert max(made.trainer.staleness) <= max_lag
    assert_each_trained_once(made, shape["steps"])


def test_samples_that_straggle_beyond_the_bound_run_again_and_are_counted() -> None:
    made = finished(seed=1, steps=12, s=1.0, k=1, n=1, max_lag=0, pace=Straggling(1))
    assert made.pipeline.run_state.ledger.counts["requeued"] > 0
    assert_each_trained_once(made, 12)


@examples(40)
@given(**shapes)
def test_at_most_s_k_b_samples_are_older_than_the_version_that_begins(**shape: Any) -> None:
    made = finished(**shape, pace=Straggling(shape["seed"]))
    per_version = shape["k"] * 4
    stale = Counter(
        version
        for (_, version), lag in zip(made.trainer.trained, made.trainer.staleness, strict=True)
        if lag
    )
    assert all(count <= shape["s"] * per_version for count in stale.values())


@examples(30)
@given(seed=st.integers(0, 10**6), k=st.integers(1, 3), n=st.sampled_from([1, 2, 4]))
def test_without_a_threshold_nothing_is_stale_however_it_straggles(
    seed: int, k: int, n: int
) -> None:
    made = finished(seed=seed, s=0.0, k=k, n=n, pace=Straggling(seed))
    assert set(made.trainer.staleness) == {0}


@examples(30)
@given(seed=st.integers(0, 10**6), other=st.integers(0, 10**6))
def test_on_policy_the_trajectory_of_versions_is_the_same_at_any_speed(
    seed: int, other: int
) -> None:
    one = finished(seed=seed, s=0.0, k=1)
    two = finished(seed=other, s=0.0, k=1, pace=Straggling(other), replicas=1)
    assert one.trainer.trained == two.trainer.trained


@examples(60)
@given(**shapes, fail_at=st.integers(0, 12))
def test_replicas_that_die_lose_nothing_while_one_is_left(fail_at: int, **shape: Any) -> None:
    async def run() -> World:
        made = world(**(shape | {"replicas": 3}), pace=Straggling(shape["seed"]))
        for student in made.students[1:]:
            student.fail_at = fail_at
        await asyncio.wait_for(made.pipeline.run(), 20)
        return made

    assert_each_trained_once(asyncio.run(run()), shape["steps"])


@examples(60)
@given(**shapes, deaths=st.lists(st.integers(0, 60), min_size=1, max_size=4))
def test_a_queue_that_dies_loses_nothing_and_doubles_nothing(
    deaths: list[int], **shape: Any
) -> None:
    async def run() -> World:
        made = world(**shape, pace=Straggling(shape["seed"]))

        async def kill() -> None:
            for pause in deaths:
                for _ in range(pause):
                    await asyncio.sleep(0)
                made.queue.die()

        killer = asyncio.create_task(kill())
        await asyncio.wait_for(made.pipeline.run(), 20)
        killer.cancel()
        return made

    made = asyncio.run(run())
    assert_each_trained_once(made, shape["steps"])
    assert made.pipeline.run_state.ledger.counts["in_flight"] == 0


async def turns(count: int) -> None:
    """Lets all others go on."""
    for _ in range(count):
        await asyncio.sleep(0)


def lost(uid: str) -> DeadLetter:
    """A copy of a rollout that no teacher can score."""
    return DeadLetter(Header(uid, 6, 0, 0, TEACHERS[int(uid[1]) % 2]), "cannot be scored")


@pytest.mark.parametrize("groups", [False, True])
async def test_a_copy_that_is_lost_while_the_other_one_is_trained_changes_nothing(
    groups: bool,
) -> None:
    run = world(groups=groups)
    take = run.trainer.batcher.take

    async def lost_meanwhile(version: int) -> Any:
        taken = await take(version)
        letters = [lost(header.uid) for header in taken.headers]
        await run.queue.put(DEAD, Batch.pack(letters * 3))
        await turns(200)
        return taken

    run.trainer.batcher.take = lost_meanwhile  # type: ignore[method-assign]
    await asyncio.wait_for(run.pipeline.run(), 20)
    counts = run.pipeline.run_state.ledger.counts
    assert (counts["trained"], counts["dead_lettered"]) == (24, 0)
    assert run.log.dead == []


async def test_a_copy_that_is_lost_while_the_trainer_holds_the_other_one_changes_nothing() -> None:
    run = world(batch_size=4, n=1)
    receive, told = run.trainer.batcher._receive, []

    async def lost_meanwhile() -> None:
        await receive()
        if not told:
            told.extend(run.trainer.batcher._held)
            await run.queue.put(DEAD, Batch.pack(map(lost, told)))
            await turns(200)

    run.trainer.batcher._receive = lost_meanwhile  # type: ignore[method-assign]
    await asyncio.wait_for(run.pipeline.run(), 20)
    assert told
    assert run.log.dead == []
    assert_each_trained_once(run, 6)


async def test_a_copy_that_comes_after_its_dead_letter_is_not_trained() -> None:
    run = world()
    put = run.scorer._put

    async def lost_before(teacher: str, scored: Any) -> None:
        uids = [header.uid for batch in scored.samples for header in batch.headers]
        await run.queue.put(DEAD, Batch.pack(lost(uid) for uid in uids if uid in ("p0/0", "p3/1")))
        await turns(200)
        await put(teacher, scored)

    run.scorer._put = lost_before  # type: ignore[method-assign]
    await asyncio.wait_for(run.pipeline.run(), 20)
    assert sorted(run.log.dead) == ["p0/0", "p3/1"]
    assert not {"p0/0", "p3/1"} & {uid for uid, _ in run.trainer.trained}
    assert_each_trained_once(run, 6)


async def test_a_step_that_is_left_out_ends_its_samples_once_although_copies_are_lost() -> None:
    run = world(share=1.0)
    step = run.trainer.step

    async def third_is_left_out() -> StepReport:
        report = await step()
        if report.step != 3:
            return report
        await run.queue.put(DEAD, Batch.pack(lost(header.uid) for header in report.trained))
        await turns(200)
        return replace(report, skipped="loss nan")

    run.trainer.step = third_is_left_out  # type: ignore[method-assign]
    await asyncio.wait_for(run.pipeline.run(), 20)
    counts = run.pipeline.run_state.ledger.counts
    assert (counts["trained"], counts["dead_lettered"], counts["in_flight"]) == (20, 4, 0)
    assert len(run.log.dead) == 4


@examples(40)
@given(**{**shapes, "n": st.sampled_from([2, 4])})
def test_a_reward_trains_whole_groups(**shape: Any) -> None:
    made = finished(**shape, groups=True, pace=Straggling(shape["seed"]))
    uids = [uid.split("/")[0] for uid, _ in made.trainer.trained]
    batches = [Counter(uids[start : start + 4]) for start in range(0, len(uids), 4)]
    assert all(set(batch.values()) == {shape["n"]} for batch in batches)


@examples(30)
@given(
    poison=st.sets(st.tuples(st.integers(0, 12), st.integers(0, 1)), max_size=6),
    groups=st.booleans(),
    **{**shapes, "n": st.just(2)},
)
def test_whatever_cannot_be_scored_every_other_sample_is_trained_once(
    poison: set[tuple[int, int]], groups: bool, **shape: Any
) -> None:
    async def run() -> World:
        made = world(**shape, groups=groups, share=1.0, pace=Pace(shape["seed"]))
        for teacher in made.teachers.values():
            teacher.poison = {f"p{prompt}/{member}" for prompt, member in poison}
        await asyncio.wait_for(made.pipeline.run(), 20)
        return made

    made = asyncio.run(run())
    assert_each_trained_once(made, shape["steps"])
    assert not {uid for uid, _ in made.trainer.trained} & set(made.log.dead)
    assert made.pipeline.run_state.ledger.counts["in_flight"] == 0


async def test_a_lease_that_expires_is_told_in_the_log() -> None:
    run = world()
    queue = run.queue._queue
    await queue.put("rollouts/a", Batch.pack([make_rollout("lost/0", "a")]))
    lease = await queue.get("rollouts/a", 1, consumer="somebody")
    queue._topics["rollouts/a"]._leases._expire(lease.id)
    with suppress(StageError):  # nobody has admitted it
        await run.pipeline.run()
    (line,) = (told for told in run.log.told if "went back" in told)
    assert line.startswith("topic rollouts/a: 1 samples went back: somebody took them")
