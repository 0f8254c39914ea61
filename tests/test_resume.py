"""Kill the pipeline anywhere, resume it, again and again: nothing is lost, nothing trained twice.

On fakes in one process, with real files: queue, worker, batcher, ledger, journal and checkpoints
are the real ones.
"""

from __future__ import annotations

import asyncio
import json
import random
import re
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import async_opd.checkpoint.store as checkpoint
from async_opd.accounting.audit import Audit, audit
from async_opd.accounting.journal import LEDGER, Journal
from async_opd.api import Callback, CallbackSink
from async_opd.checkpoint import earlier_run
from async_opd.checkpoint.checkpointer import Checkpointer
from async_opd.checkpoint.mirror import Mirror
from async_opd.checkpoint.resume import cut_files, evaluated_steps, refuse_impossible
from async_opd.checkpoint.run_copies import RunCopies
from async_opd.checkpoint.store import Checkpoint, Checkpoints
from async_opd.core.batch import Batch, unpack
from async_opd.core.errors import StageError
from async_opd.core.reports import Captured, WrittenFile
from async_opd.core.samples import Rollout, Sample, VersionSpan
from async_opd.core.scores import SampledLogprobs
from async_opd.core.stages import LOG
from async_opd.files import durable
from async_opd.files.run_format import write_run_format
from async_opd.grading.evaluation import Evaluation
from async_opd.observability.run_log import METRICS, RUN_LOG, RunLog
from async_opd.observability.sinks import Sink
from async_opd.pipeline import Pipeline
from tests.properties import examples
from tests.trainer.test_learner import learner
from tests.world.clock import Pace, Straggling, settle
from tests.world.config import changed
from tests.world.faults import NO_FAULTS, Faults, assert_one_state_each, faults
from tests.world.run import World, shapes_without, world
from tests.world.run import evaluation as evaluation_of
from tests.world.trainer import FakeTrainer
from trainer.batcher import Batcher, TrainBatch
from trainer.saving.sample_file import read_scored

B = 4


class Killed(BaseException):
    """The process is gone: nothing after this line runs."""


@contextmanager
def files_fail_after(operations: int | None) -> Iterator[None]:
    """Kills the writer of a checkpoint at one of its file operations; calls run in this thread."""
    left = [operations]

    def counted(real: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            if left[0] is not None:
                left[0] -= 1
                if left[0] < 0:
                    raise Killed
            return real(*args, **kwargs)

        return call

    async def inline(function: Any, *args: Any, **kwargs: Any) -> Any:
        await asyncio.sleep(0)
        return function(*args, **kwargs)

    with (
        patch.object(asyncio, "to_thread", inline),
        patch.object(durable, "flush", counted(durable.flush)),
        patch.object(durable, "checksum", counted(durable.checksum)),
        patch.object(checkpoint, "flush", counted(durable.flush)),
        patch.object(checkpoint, "checksum", counted(durable.checksum)),
        patch.object(Path, "rename", counted(Path.rename)),
        patch.object(Path, "write_bytes", counted(Path.write_bytes)),
    ):
        yield


def _trainer_fails(world: World) -> None:
    """After its next step, whose report is lost."""
    step = world.trainer.step

    async def unheard() -> Any:
        await step()
        raise StageError("trainer", "its answer was lost")

    world.trainer.step = unheard  # type: ignore[method-assign]


BLOWS: dict[str, Callable[[World], object]] = {
    "students": lambda world: [setattr(one, "fail_at", 0) for one in world.students],
    "teachers": lambda world: [setattr(one, "dead", True) for one in world.teachers.values()],
    "sync": lambda world: setattr(world.sync, "fail", True),
    "trainer": _trainer_fails,
}


def newest(folder: Path) -> Checkpoint | None:
    """The newest checkpoint of a run directory, if there is one."""
    return Checkpoints(folder / "checkpoints", 2).newest(lambda text: None)


def kept(folder: Path) -> Checkpoint:
    """The newest checkpoint, which is there."""
    found = newest(folder)
    assert found is not None
    return found


class Life:
    """One process of a run: from its start or the newest checkpoint to its end or its death."""

    def __init__(
        self,
        folder: Path,
        journal: Journal,
        seed: int,
        shape: dict[str, Any],
        faults: Faults = NO_FAULTS,
        evaluation: Evaluation | None = None,
        log: RunLog | None = None,
    ) -> None:
        made = world(**shape | {"seed": seed}, pace=Straggling(seed))
        config = changed(made.pipeline.config, checkpoint={"every": 1}, eval={"teachers": True})
        faults.into(made, seed)
        self.faults = faults
        self.messages: list[str] = []
        write_run_format(folder)
        store = Checkpoints(folder / "checkpoints", keep=2)
        self.start = store.newest(self.messages.append)
        if self.start is not None:
            refuse_impossible(self.start.cut, config)  # what a run writes, it accepts
        evaluated = evaluated_steps(folder)
        store.forget_evaluations(evaluated, self.messages.append)
        self.world: World = made
        self.checkpointer = Checkpointer(
            store,
            made.trainer,
            config="{}",
            timeout_s=60,
            keep_best="eval/a/accuracy",
            notify=self.messages.append,
            sizes=lambda: {LEDGER: journal.size},
            sync=journal.sync,
        )
        self.pipeline = Pipeline(
            config,
            made.pipeline.stages,
            faults.stream(self.start.cut.cursor if self.start else 0),
            evaluation,
            made.log if log is None else log,
            journal,
            self.checkpointer,
            self.start,
            evaluated=max(evaluated, default=-1),
            reading=made.pipeline.reading,
        )

    async def live(self, ticks: int | None, end: str = "kill") -> bool:
        """Runs for some turns of the event loop, or to the end. Whether it came there.

        Then it is killed, or a signal or the failure of a stage ends it, with a last checkpoint.
        """
        work = asyncio.create_task(self.pipeline.run())
        with self.faults.striking(lambda: self.world.queue):
            return await self._live(work, ticks, end)

    async def live_until(self, step: int) -> None:
        """Until so many steps are trained and others are not; then a signal ends it."""
        work = asyncio.create_task(self.pipeline.run())
        for _ in range(10**5):
            if self.world.trainer.steps >= step:
                break
            await asyncio.sleep(0)
        await self._end(work, "signal")

    async def _live(self, work: asyncio.Task[None], ticks: int | None, end: str) -> bool:
        await self._turn(work, ticks)
        if end in BLOWS and not work.done():
            BLOWS[end](self.world)
            await self._turn(work, 3000)  # some failures are mended for a while
        if work.done() and not work.cancelled() and work.exception() is None:
            return True
        if ticks is None:
            await work  # nobody has disturbed it
        await self._end(work, end)
        return False

    async def _end(self, work: asyncio.Task[None], end: str) -> None:
        work.cancel()
        with suppress(asyncio.CancelledError, Killed, BaseExceptionGroup, StageError):
            await work
        if end != "kill":
            with suppress(StageError):  # the trainer had not read the checkpoint yet
                await self.pipeline.checkpoint()
        await self._kill_writer()

    async def _turn(self, work: asyncio.Task[None], ticks: int | None) -> None:
        for _ in range(10**6 if ticks is None else ticks):
            await asyncio.sleep(0)
            if work.done() or self._writer_died():
                return

    def _writer_died(self) -> bool:
        writing = self.checkpointer._writing
        return bool(writing and writing.done() and writing.exception())

    async def _kill_writer(self) -> None:
        if self.checkpointer._writing is not None:
            self.checkpointer._writing.cancel()
            with suppress(asyncio.CancelledError, Killed):
                await self.checkpointer._writing
            self.checkpointer._writing = None


@contextmanager
def a_life(
    folder: Path, seed: int, shape: dict[str, Any], *given: Any, operations: int | None = None
) -> Iterator[Life]:
    """One life of the run in a folder, from its newest checkpoint on."""
    start = newest(folder)
    with Journal(folder / LEDGER, start.cut.files[LEDGER] if start else 0) as journal:
        life = Life(folder, journal, seed, shape, *given)  # reads the checkpoint: no kill in that
        with files_fail_after(operations):
            yield life


def live(folder: Path, seed: int, shape: dict[str, Any], ticks: int | None, **how: Any) -> bool:
    """Whether one life of the run in a folder ends it."""
    operations, faults = how.pop("operations", None), how.pop("faults", NO_FAULTS)

    async def run() -> bool:
        with a_life(folder, seed, shape, faults, operations=operations) as begun:
            return await begun.live(ticks, **how)

    return asyncio.run(run())


def tear(folder: Path, chance: random.Random) -> None:
    """A kill in the middle of a line."""
    if chance.random() < 0.3:
        with (folder / LEDGER).open("ab") as file:
            file.write(b'{"step":')


thresholds = st.sampled_from([0.0, 0.5, 1.0, 4.0])
kills = st.lists(
    st.tuples(
        st.integers(0, 600),  # turns of the event loop until the end
        st.sampled_from(["kill", "kill", "signal", *BLOWS]),
        st.sampled_from([None, None, *range(14)]),  # file operations until a kill
    ),
    max_size=4,
)


Kills = list[tuple[int, str, int | None]]


def killed_until_done(seed: int, kills: Kills, shape: dict[str, Any], faults: Faults) -> Audit:
    """What is in the journal of a run that was killed so often, and then went on to its end."""
    chance = random.Random(seed)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for number, (ticks, end, operations) in enumerate(kills):
            how = {"end": end, "operations": operations if end == "kill" else None}
            if live(folder, seed + number, shape, ticks, faults=faults, **how):
                break
            tear(folder, chance)
        else:
            assert live(folder, seed + 99, shape, None, faults=faults)
        return audit(folder)


@pytest.mark.filterwarnings("ignore:coroutine")  # killed before its stages began
@examples(60)
@given(seed=st.integers(0, 10**6), kills=kills, shape=shapes_without("seed"))
def test_after_any_crashes_the_trained_samples_are_those_of_an_undisturbed_run(
    seed: int, kills: Kills, shape: dict[str, Any]
) -> None:
    found = killed_until_done(seed, kills, shape, NO_FAULTS)
    prompts = shape["steps"] * B // shape["n"]
    undisturbed = Counter(f"p{p}/{m}" for p in range(prompts) for m in range(shape["n"]))
    assert Counter(found.trained) == undisturbed
    assert (found.steps, found.duplicated, found.in_flight) == (shape["steps"], (), ())


@pytest.mark.filterwarnings("ignore:coroutine")  # killed before its stages began
@examples(60)
@given(
    seed=st.integers(0, 10**6),
    kills=kills,
    faults=faults,
    groups=st.booleans(),
    max_lag=st.sampled_from([None, 0, 1]),
    shape=shapes_without("seed", "n"),
    n=st.sampled_from([2, 4]),
)
@pytest.mark.slow
def test_whatever_fails_dies_and_has_copies_every_sample_has_one_state(
    seed: int, kills: Kills, faults: Faults, shape: dict[str, Any], **more: Any
) -> None:
    found = killed_until_done(seed, kills, shape | more | {"share": 1.0}, faults)
    assert_one_state_each(found, shape["steps"] * B)


@pytest.mark.filterwarnings("ignore:coroutine")  # killed before its stages began
@examples(30)
@given(
    seed=st.integers(0, 10**6),
    lives=st.lists(st.tuples(st.integers(0, 400), thresholds), min_size=1, max_size=3),
    last=thresholds,
    shape=shapes_without("seed", "s"),
)
def test_with_a_threshold_that_changes_at_each_resume_each_sample_is_trained_once(
    seed: int, lives: list[tuple[int, float]], last: float, shape: dict[str, Any]
) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for number, (ticks, s) in enumerate(lives):
            if live(folder, seed + number, shape | {"s": s}, ticks, end="signal"):
                break
        else:
            assert live(folder, seed + 99, shape | {"s": last}, None)
        found = audit(folder)
    assert len(found.trained) == len(set(found.trained)) == shape["steps"] * B
    assert (found.duplicated, found.in_flight) == ((), ())


SHAPE = {"steps": 6, "n": 2, "k": 2, "s": 0.5}
FORM = {"train/truncated_share": 0.0, "train/repetition": 0.0, "train/mean_response_tokens": 5.0}


def evaluation(seed: int) -> Evaluation:
    """Takes a while, so that training goes on meanwhile."""
    pace = Straggling(seed)

    async def grade(rollout: Rollout) -> float:
        await pace.wait()
        return 1.0

    return evaluation_of(grade, prompts=3)


def ahead(world: World) -> None:
    """Evaluations have separate replicas, with the weights of the newest snapshot."""
    generate = world.rollouter.generate

    async def with_snapshot(*asked: Any) -> list[Rollout]:
        spans = (VersionSpan(world.trainer.version, 0, 4),)
        return [replace(one, version_spans=spans) for one in await generate(*asked)]

    world.rollouter.generate = with_snapshot  # type: ignore[method-assign]


def live_and_evaluate(
    folder: Path,
    seed: int,
    shape: dict[str, Any],
    ticks: int | None,
    end: str = "kill",
    *,
    until: int | None = None,
    replicas: bool = False,
) -> bool:
    """One life of a run whose metrics are kept: they are cut to its checkpoint before."""
    start = newest(folder)
    before = cut_files(folder, start.cut if start else None)

    async def run() -> bool:
        config = world(**shape).pipeline.config
        with (
            RunLog(config, folder, sinks=[], before=before) as log,
            a_life(folder, seed, shape, NO_FAULTS, evaluation(seed), log) as life,
        ):
            if replicas:
                ahead(life.world)
            if until is None:
                return await life.live(ticks, end)
            await life.live_until(until)
            return False

    return asyncio.run(run())


def steps_with(folder: Path, key: str) -> list[int]:
    """The steps of all rows that have a metric."""
    lines = [json.loads(line) for line in (folder / METRICS).read_text().splitlines()]
    return [line["step"] for line in lines if key in line]


def trained_rows(folder: Path) -> list[int]:
    """The steps of all rows of trained steps."""
    return steps_with(folder, "staleness/mean")


def named_without_evaluation(folder: Path) -> list[int]:
    """The steps of which ``run.log`` says that they have no evaluation; first and last of many."""
    lines = re.findall(r"steps? (\d+)(?: to (\d+))?: no evaluation", (folder / RUN_LOG).read_text())
    return [at for first, last in lines for at in range(int(first), int(last or first) + 1)]


def assert_recorded(folder: Path, shape: dict[str, Any], undisturbed: bool = False) -> None:
    """Each step has one row, each evaluation that was due one value or a line that says why not."""
    steps, k = shape["steps"], shape["k"]
    assert trained_rows(folder) == list(range(1, steps + 1))
    assert steps_with(folder, "eval_initial/a/accuracy") == [0]
    found = steps_with(folder, "eval/a/accuracy")
    named, due = set(named_without_evaluation(folder)), {*range(k, steps, k), steps}
    assert found == sorted(set(found))
    assert found[-1] == steps
    assert due <= {*found, *named}
    if undisturbed:
        assert {*found} == due - named


ends = st.sampled_from(["kill", "signal", "signal", *BLOWS])


@pytest.mark.filterwarnings("ignore:coroutine")  # killed before its stages began
@examples(40)
@given(
    seed=st.integers(0, 10**6),
    lives=st.lists(st.tuples(st.integers(0, 800), ends), max_size=3),
    replicas=st.booleans(),
    shape=shapes_without("seed"),
)
def test_however_a_run_is_interrupted_each_step_has_a_row_and_each_due_evaluation_is_accounted_for(
    seed: int, lives: list[tuple[int, str]], replicas: bool, shape: dict[str, Any]
) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if not any(
            live_and_evaluate(folder, seed + number, shape, *life, replicas=replicas)
            for number, life in enumerate(lives)
        ):
            assert live_and_evaluate(folder, seed + 99, shape, None, replicas=replicas)
        assert_recorded(folder, shape, undisturbed=not lives)
        assert steps_with(folder, "eval_teacher/seconds") == [0]
        values = Checkpoints(folder / "checkpoints", 2).evaluated.values()
        assert sorted(values) == steps_with(folder, "eval/a/accuracy")


@pytest.mark.parametrize("ticks", [5, 20, 40])
@pytest.mark.slow
def test_evaluations_before_training_that_a_signal_broke_off_are_made_after_the_resume(
    tmp_path: Path, ticks: int
) -> None:
    assert not live_and_evaluate(tmp_path, 1, SHAPE, ticks, "signal")
    assert kept(tmp_path).cut.step == 0
    assert live_and_evaluate(tmp_path, 2, SHAPE, None)
    for key in ("eval_initial/a/accuracy", "eval_teacher/seconds"):
        assert steps_with(tmp_path, key) == [0]


@pytest.mark.parametrize("trained", [2, 4, 5, 8, 9])
def test_an_evaluation_that_a_signal_broke_off_is_made_with_the_checkpoints_weights(
    tmp_path: Path, trained: int
) -> None:
    shape = SHAPE | {"s": 2.5, "steps": 12}
    live_and_evaluate(tmp_path, 1, shape, None, until=trained)
    step = kept(tmp_path).cut.step
    assert live_and_evaluate(tmp_path, 2, shape, None)
    found = steps_with(tmp_path, "eval/a/accuracy")
    assert len(set(found)) == len(found)
    assert sum(step - step % 2 <= at < step - step % 2 + 2 for at in found) == 1
    assert {12} <= {at for at in found if at > step} <= {*range(step - step % 2 + 2, 13, 2)}


async def begun(folder: Path, seed: int, shape: dict[str, Any]) -> None:
    """A signal ends a run after its third step."""
    with a_life(folder, seed, shape) as life:
        await life.live_until(3)


class Learning(FakeTrainer):
    """Trains a real learner, whose state is in its checkpoints."""

    def __init__(self, batcher: Batcher, pace: Pace) -> None:
        super().__init__(batcher, pace)
        self.learner = learner(kind="k1", lr=1e-2)

    async def _take(self) -> tuple[TrainBatch, Sequence[Sample]]:
        batch, samples = await super()._take()
        self.learner.train_batch(samples)
        return batch, samples

    async def capture(self) -> Captured:
        self.learner.capture(self.version)
        return await super().capture()

    async def checkpoint(self, directory: str, in_flight: frozenset[str]) -> dict[str, WrittenFile]:
        files = self.learner.write(directory)
        return {**await super().checkpoint(directory, in_flight), **files}

    async def restore(self, directory: str) -> frozenset[str]:
        self.learner.restore(directory)
        return await super().restore(directory)


def scored_apart(batch: Batch) -> Batch:
    """Each sample has other scores than all others: weights depend on which of them is trained."""
    rollouts = unpack(Rollout, [batch])
    return Batch.pack(
        Sample(one, SampledLogprobs(-np.random.default_rng(list(one.uid.encode())).random(4, "f4")))
        for one in rollouts
    )


async def learned(
    folder: Path, seed: int, shape: dict[str, Any], *life: Any
) -> dict[str, torch.Tensor] | None:
    """The weights at the end of a run's life; None if it ends before the last step."""
    with a_life(folder, seed, shape, Faults(images=False)) as begun:
        for teacher in begun.world.teachers.values():
            teacher.answer = scored_apart
        trainer: Any = begun.world.trainer
        return trainer.learner.model.state_dict() if await begun.live(*life) else None


@pytest.mark.parametrize("payloads", [True, False])
async def test_weights_after_a_resume_with_stored_payloads_are_those_of_an_undisturbed_run(
    tmp_path: Path, payloads: bool
) -> None:
    """Exactly on-policy, so that batches do not depend on speed. Undisturbed, none is stored."""
    on_policy = {"steps": 6, "n": 2, "k": 1, "s": 0.0, "trainer_of": Learning}
    undisturbed, resumed = tmp_path / "undisturbed", tmp_path / "resumed"
    undisturbed.mkdir()
    wanted = await learned(undisturbed, 1, on_policy, None)
    shape, ticks = on_policy | {"payloads": payloads, "stored": True}, 200
    scored: Sequence[Sample] = ()
    while not scored:
        shutil.rmtree(resumed, ignore_errors=True)
        resumed.mkdir()
        assert await learned(resumed, ticks, shape, ticks, "signal") is None
        scored, ticks = read_scored(kept(resumed).folder), ticks + 20
    found = await learned(resumed, 2, shape, None)
    assert wanted
    assert found
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)


async def test_weight_versions_go_on_after_a_resume(tmp_path: Path) -> None:
    await begun(tmp_path, 3, SHAPE)
    assert 0 < kept(tmp_path).cut.step < 6
    with a_life(tmp_path, 5, SHAPE) as life:
        assert await life.live(None)
    assert [student.version for student in life.world.students] == [3, 3]


@pytest.mark.parametrize("seed", range(3))
async def test_a_queue_that_dies_before_a_resume_has_pushed_its_weights_reissues_nothing(
    tmp_path: Path, seed: int
) -> None:
    shape = SHAPE | {"s": 0.0, "k": 2}
    await begun(tmp_path, seed, shape)
    cut = kept(tmp_path).cut
    assert cut.version > 0
    assert cut.ledger.in_flight
    with a_life(tmp_path, 5, shape) as life:
        push, queue = life.world.sync.push, life.world.queue

        async def dies_before() -> Any:
            queue.die()
            await settle(300)
            life.world.sync.push = push  # type: ignore[method-assign]
            return await push()

        life.world.sync.push = dies_before  # type: ignore[method-assign]
        assert await life.live(None)
    started = [of for student in life.world.students for _, of in student.started]
    assert min(started) >= cut.version
    assert set(life.world.trainer.staleness) == {0}


@pytest.mark.parametrize("payloads", [True, False])
@pytest.mark.slow
async def test_a_queue_that_dies_at_any_moment_of_a_resume_loses_no_scored_sample(
    tmp_path: Path, payloads: bool
) -> None:
    """Several ranks have them in the queue again, one rank holds them itself."""
    shape = SHAPE | {"s": 2.5, "payloads": payloads}
    first, resumed = tmp_path / "first", tmp_path / "resumed"

    async def live_on(folder: Path, turns: int) -> bool:
        """The queue dies so long after a restore began. Whether no weights were pushed by then."""
        with a_life(folder, 5, shape) as life:
            restore, push = life.world.trainer.restore, life.world.sync.push
            tasks, pushed = list[asyncio.Task[bool]](), asyncio.Event()

            async def dies() -> bool:
                await settle(turns)
                life.world.queue.die()
                return not pushed.is_set()

            async def restored(directory: str) -> frozenset[str]:
                tasks.append(asyncio.create_task(dies()))
                scored = await restore(directory)
                assert scored
                return scored

            async def noted() -> Any:
                report = await push()
                pushed.set()
                return report

            life.world.trainer.restore = restored  # type: ignore[method-assign]
            life.world.sync.push = noted  # type: ignore[method-assign]
            assert await life.live(None)
            return await tasks[0]

    first.mkdir()
    await begun(first, 1, shape)
    turns, before = 0, True
    while before:
        shutil.copytree(first, resumed)
        before = await live_on(resumed, turns)
        found = audit(resumed)
        assert (len(found.trained), found.duplicated, found.in_flight) == (6 * B, (), ()), turns
        shutil.rmtree(resumed)
        turns += before
    assert turns > 10


async def test_a_full_disk_is_counted_and_logged_and_the_run_goes_on(tmp_path: Path) -> None:
    with a_life(tmp_path, 1, SHAPE) as life:
        checkpoint, calls = life.world.trainer.checkpoint, []

        async def full_after_one(directory: str, in_flight: frozenset[str]) -> Any:
            calls.append(directory)
            if len(calls) > 1:
                raise OSError(28, "No space left on device")
            return await checkpoint(directory, in_flight)

        life.world.trainer.checkpoint = full_after_one  # type: ignore[method-assign]
        assert await life.live(None)
    assert life.checkpointer.metrics["checkpoint/failures"] >= 1
    assert any("No space left on device" in text for text in life.messages)
    kept(tmp_path)
    assert list((tmp_path / "checkpoints").glob(".*")) == []


async def test_a_step_whose_report_was_lost_is_in_the_checkpoint(tmp_path: Path) -> None:
    with a_life(tmp_path, 1, SHAPE) as life:
        trainer, step = life.world.trainer, life.world.trainer.step
        trainer.metrics = FORM

        async def unheard() -> Any:
            if trainer.steps == 3:
                await step()
                await asyncio.Event().wait()
            return await step()

        trainer.step = unheard  # type: ignore[method-assign]
        await life.live(3000, end="signal")
    assert trainer.steps == 4
    assert life.world.log.steps == [1, 2, 3, 4]
    cut = kept(tmp_path).cut
    assert (cut.step, cut.ledger.trained, cut.guardrail.lengths) == (4, 16, (5.0,) * 4)
    assert len(audit(tmp_path).trained) == 16


def logged(
    folder: Path, end: str = "signal", unanswered: int = 99, sinks: Sequence[Sink] = ()
) -> list[int]:
    """The steps with rows, and last the checkpoint's step, of a run whose reports come to an end.

    Step ``unanswered`` and later ones are trained, and the rollout stage reports no more.
    """

    async def run() -> None:
        config = world(**SHAPE).pipeline.config
        with (
            RunLog(config, folder, sinks=[*sinks]) as log,
            a_life(folder, 1, SHAPE, NO_FAULTS, None, log) as life,
        ):
            report, step = life.world.rollouter.report, life.world.trainer.step

            async def silent() -> Any:
                if life.world.trainer.steps >= unanswered:
                    await asyncio.Event().wait()
                return await report()

            async def noting() -> Any:
                report = await step()
                return replace(report, notes=(f"a note of step {report.step}.",))

            life.world.rollouter.report = silent  # type: ignore[method-assign]
            life.world.trainer.step = noting  # type: ignore[method-assign]
            life.world.trainer.metrics = FORM
            await life.live(3000, end=end)

    asyncio.run(run())
    found = newest(folder)
    return [*trained_rows(folder), found.cut.step if found else 0]


def test_no_checkpoint_is_written_before_the_row_of_its_step(tmp_path: Path) -> None:
    """A run that is killed in between would go on after it, and never have the row."""
    *rows, step = logged(tmp_path, "kill", unanswered=4)
    assert (rows, step) == ([1, 2, 3], 2)


def test_a_signal_before_a_row_is_made_leaves_the_row_of_what_the_trainer_reported(
    tmp_path: Path,
) -> None:
    *rows, step = logged(tmp_path, unanswered=3)
    assert rows == list(range(1, step + 1))
    assert len(kept(tmp_path).cut.guardrail.lengths) == step
    text = (tmp_path / RUN_LOG).read_text()
    assert all(text.count(f"trainer: a note of step {row}.") == 1 for row in rows)


class FailingCallback(Callback):
    def on_row(self, step: int, metrics: Mapping[str, float]) -> None:
        if step == 3:
            raise ValueError("a chart is full")


def test_a_callback_that_fails_leaves_one_row_of_each_step_of_the_last_checkpoint(
    tmp_path: Path,
) -> None:
    *rows, step = logged(tmp_path, sinks=[CallbackSink([FailingCallback()])])
    assert step >= 3
    assert rows == list(range(1, step + 1))


def test_a_row_that_could_not_be_written_comes_before_the_last_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log, full = RunLog.log, [StageError(LOG, "metrics.jsonl cannot be written")]

    def once_full(made: RunLog, step: int, metrics: Mapping[str, float]) -> None:
        if step == 3 and full:
            raise full.pop()
        log(made, step, metrics)

    monkeypatch.setattr(RunLog, "log", once_full)
    *rows, step = logged(tmp_path)
    assert step >= 3
    assert rows == list(range(1, step + 1))
    assert len(kept(tmp_path).cut.guardrail.lengths) == step


async def test_a_trainer_that_is_elsewhere_than_the_ledger_makes_no_checkpoint(
    tmp_path: Path,
) -> None:
    with a_life(tmp_path, 1, SHAPE) as life:
        await life.live(100)
        life.world.trainer.steps += 5
        with pytest.raises(StageError, match="the trainer is at step"):
            await life.pipeline.checkpoint()


@pytest.mark.filterwarnings("ignore:coroutine")  # killed before its stages began
def test_from_its_mirror_a_run_goes_on_byte_for_byte_as_from_its_own_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(earlier_run, "refuse_changes", lambda before, now: None)  # both are "{}"
    own, other, url = tmp_path / "own", tmp_path / "other", f"file://{tmp_path}/bucket"
    own.mkdir()
    write_run_format(own)
    assert not live(own, 1, SHAPE | {"steps": 12}, 400, end="signal")
    Mirror(Checkpoints(own / "checkpoints", 2), RunCopies.at(url), 20, 20)._sync(False)
    earlier_run.take_mirrored(url, other, "{}")
    taken = kept(other)
    assert 0 < taken.cut.step < 12
    for folder in (own, other):
        assert live(folder, 2, SHAPE | {"steps": 12}, None)
    assert (other / LEDGER).read_bytes() == (own / LEDGER).read_bytes()
    for name in (path.name for path in taken.folder.parent.glob("step_12/*")):
        one, two = (folder / "checkpoints/step_12" / name for folder in (own, other))
        assert one.read_bytes() == two.read_bytes()
    assert (audit(other).steps, audit(other).duplicated) == (12, ())
