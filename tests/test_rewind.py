"""A trainer that dies, again and again, in a run that goes on: on fakes, with real files."""

from __future__ import annotations

import asyncio
import json
import re
import tempfile
import threading
from collections import Counter
from collections.abc import Awaitable
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
from hypothesis import given
from hypothesis import strategies as st

from async_opd import training as trainings
from async_opd.accounting.audit import audit
from async_opd.accounting.journal import LEDGER, Journal
from async_opd.accounting.lineage import RollBack, add_roll_back, read_roll_backs
from async_opd.accounting.run_state import Cut
from async_opd.checkpoint.checkpointer import Checkpointer
from async_opd.checkpoint.mirror import Mirror
from async_opd.checkpoint.recovery import Recovery
from async_opd.checkpoint.resume import cut_files
from async_opd.checkpoint.store import Checkpoints
from async_opd.core.errors import (
    CheckpointError,
    GuardrailExceeded,
    HeadLost,
    ProcessDied,
    StageError,
)
from async_opd.core.reports import Captured
from async_opd.core.stages import PROMPTS
from async_opd.files.run_format import write_run_format
from async_opd.grading.evaluation import Evaluation
from async_opd.job import Job
from async_opd.observability.run_log import RunLog
from async_opd.prepare import Prepared
from async_opd.training import Training
from async_opd.waiting.deadline import race
from async_opd.waiting.waits import Waits
from tests.properties import examples
from tests.test_resume import FORM, B, assert_recorded, evaluation, steps_with, trained_rows
from tests.world.clock import PacedReads, Straggling, settle
from tests.world.config import changed
from tests.world.faults import NO_FAULTS, Faults, assert_one_state_each, faults
from tests.world.prompts import FakePrompts
from tests.world.run import World, shapes, shapes_without, world
from tests.world.trainer import FakeTrainer

DIED = ProcessDied("trainer", "its process died")
HEAD_LOST = HeadLost("cluster", "Ray's head has not answered for 20 s")


class Mortal:
    """Handles that stay while what they stand for is replaced, as the cluster's are."""

    def __init__(
        self, shape: dict[str, Any], tries: int | None, faults: Faults = NO_FAULTS
    ) -> None:
        """With ``tries`` the trainer dies at once each time, until it may not be restarted."""
        self.shape, self.tries, self.faults = shape, tries, faults
        self.mixed = False  # the weights of the replicas
        self.head_is_lost = asyncio.Event()
        self.deaths = 0
        self.rewinds = 0
        self.synced: list[tuple[int, bool]] = []  # snapshots of all worlds
        self._begin()
        self.trainer: Any = Handle(self)

    def _begin(self) -> None:
        self.death = asyncio.Event()
        seed = self.shape["seed"] + self.deaths
        self.world: World = world(**self.shape | {"seed": seed}, pace=Straggling(seed))
        self.faults.into(self.world, seed)
        self.world.sync.snapshots = self.synced

    @property
    def verified_version(self) -> int | None:
        return self.world.sync.verified

    async def write_verified(self, directory: str) -> tuple[str, str]:
        if self.mixed:
            raise StageError("rollouter", "student/0 has others, of a sync that broke off")
        folder = Path(directory) / "0"
        folder.mkdir()
        (folder / "weights.json").write_text(str(self.world.sync.verified))
        return str(folder), "student/0 (bfloat16)"

    async def watched(self, work: Awaitable[None]) -> None:
        async def lost() -> None:
            await self.head_is_lost.wait()
            raise HEAD_LOST

        await race(lost(), work)

    def die(self) -> None:
        self.deaths += 1
        self.death.set()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.world.pipeline.stages, name)

    async def rewind(self, error: ProcessDied) -> None:
        if self.rewinds == self.tries:
            raise error
        self.rewinds += 1
        self._begin()
        if self.tries is not None:
            self.die()


class Handle:
    """Calls break off with ProcessDied when the trainer dies."""

    def __init__(self, stages: Mortal) -> None:
        self._stages = stages

    def __getattr__(self, name: str) -> Any:
        async def call(*args: Any) -> Any:
            end = asyncio.create_task(self._stages.death.wait())
            work = asyncio.create_task(getattr(self._stages.world.trainer, name)(*args))
            try:
                await asyncio.wait({end, work}, return_when=asyncio.FIRST_COMPLETED)
                if end.done():
                    raise DIED
                return work.result()
            finally:
                end.cancel()
                work.cancel()

        return call


async def train(
    folder: Path,
    deaths: list[int],
    shape: dict[str, Any],
    tries: int | None = None,
    faults: Faults = NO_FAULTS,
    keep: int = 2,
    evaluated: Evaluation | None = None,
    mirror: Mirror | None = None,
    recovery: str = "checkpoint",
    every: int = 1,
    mixed: bool = False,
) -> Mortal:
    """A run from its start, or from the newest checkpoint in the folder."""
    write_run_format(folder)
    start = Checkpoints(folder / "checkpoints", keep).newest(lambda text: None)
    stages = Mortal(shape, tries, faults)
    stages.mixed = mixed
    config = changed(
        stages.world.pipeline.config,
        cluster={"trainer_recovery": recovery},
        sync={"verify_every": 1},
        checkpoint={"every": every, "keep": keep, "keep_best": evaluated and "eval/a/accuracy"},
        log={"console": "off", "wandb": "off"},
    )
    text: Any = SimpleNamespace(encode=None)
    text.of_teacher = lambda *_: text  # no teacher has a template of its own
    inputs: Any = SimpleNamespace(train=(), checked=(), eval=(), max_eval_prompt_tokens=None)

    async def kill() -> None:
        for turns in deaths:
            await settle(turns)
            stages.die()

    size, viewers = start.cut.files[LEDGER] if start else 0, [] if mirror is None else [mirror]
    with (
        RunLog(config, folder, sinks=[], viewers=viewers) as log,
        Journal(folder / LEDGER, size) as journal,
    ):
        job = Job(Prepared(config, inputs, "cpu"), folder, start, log, journal, mirror)
        if mirror is not None:
            mirror.notify = log.message
        with (
            patch.object(trainings, "training_prompts", partial(from_cursor, faults)),
            patch.object(trainings, "evaluation_of", lambda *_: evaluated),
        ):
            reads: Any = PacedReads(stages.world.pace)
            training = Training(job, stages, text, reads)  # type: ignore[arg-type]
            killer = asyncio.create_task(kill())
            try:
                with faults.striking(lambda: stages.queue):
                    await training.run()
            finally:
                killer.cancel()
        log.finish("completed")
    return stages


def from_cursor(faults: Faults, job: Job, text: object, readers: object) -> FakePrompts:
    return faults.stream(job.start.cut.cursor if job.start else 0)


@examples(30)
@given(deaths=st.lists(st.integers(0, 400), max_size=4), **shapes)
def test_whenever_the_trainer_dies_each_sample_is_trained_once(
    deaths: list[int], **shape: Any
) -> None:
    with tempfile.TemporaryDirectory() as name:
        asyncio.run(train(Path(name), deaths, shape))
        found, rows = audit(Path(name)), trained_rows(Path(name))
    assert rows == list(range(1, shape["steps"] + 1))
    prompts = shape["steps"] * B // shape["n"]
    wanted = Counter(f"p{p}/{m}" for p in range(prompts) for m in range(shape["n"]))
    assert Counter(found.trained) == wanted
    assert (found.lost, found.duplicated, found.steps) == ((), (), shape["steps"])


@examples(30)
@given(deaths=st.lists(st.integers(0, 800), min_size=1, max_size=3), **shapes)
def test_whenever_the_trainer_dies_each_due_evaluation_is_accounted_for(
    deaths: list[int], **shape: Any
) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        stages = asyncio.run(train(folder, deaths, shape, evaluated=evaluation(shape["seed"])))
        assert_recorded(folder, shape, undisturbed=not stages.rewinds)
        values = json.loads((folder / "checkpoints/evaluated.json").read_text())["values"]
        assert sorted(map(int, values)) == steps_with(folder, "eval/a/accuracy")


@examples(40)
@given(
    deaths=st.lists(st.integers(0, 400), max_size=3),
    faults=faults,
    groups=st.booleans(),
    max_lag=st.sampled_from([None, 0, 1]),
    shape=shapes_without("n"),
    n=st.sampled_from([2, 4]),
)
@pytest.mark.slow
def test_whatever_fails_and_has_copies_while_the_trainer_dies_every_sample_has_one_state(
    deaths: list[int], faults: Faults, shape: dict[str, Any], **more: Any
) -> None:
    shape = shape | more | {"share": 1.0}
    with tempfile.TemporaryDirectory() as name:
        asyncio.run(train(Path(name), deaths, shape, faults=faults))
        assert_one_state_each(audit(Path(name)), shape["steps"] * B)


SHAPE = {"seed": 1, "steps": 6, "n": 2, "k": 2, "s": 0.5}
COPIES = Faults(strokes=((0, "copies"),))


@pytest.fixture(autouse=True)
def _fakes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trainings, "identity", lambda config, rows: "{}")


async def test_before_the_first_checkpoint_the_run_starts_again(tmp_path: Path) -> None:
    stages = await train(tmp_path, [5], SHAPE)
    assert stages.rewinds == 1
    assert stages.synced[0] == (0, True)


async def test_nothing_of_a_pipeline_that_has_ended_is_issued_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rewind, queued = Mortal.rewind, []

    async def struck(stages: Mortal, error: ProcessDied) -> None:
        await COPIES.strike(lambda: stages.queue)
        await rewind(stages, error)
        await COPIES.strike(lambda: stages.queue)
        await settle(20)
        queued.append(await stages.queue.headers(PROMPTS))

    monkeypatch.setattr(Mortal, "rewind", struck)
    await train(tmp_path, [80], SHAPE)
    assert queued == [()]


async def test_a_trainer_that_dies_too_often_ends_the_run_with_its_error(tmp_path: Path) -> None:
    with pytest.raises(ProcessDied, match="trainer: its process died"):
        await train(tmp_path, [5], SHAPE, tries=2)


async def test_after_a_death_metrics_are_cut_and_prompts_read_ahead_beside_the_event_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: list[threading.Thread] = []

    def cut(run_dir: Path, cut: Cut | None) -> dict[str, float]:
        threads.append(threading.current_thread())
        return cut_files(run_dir, cut)

    def read_ahead(prompts: FakePrompts) -> None:
        threads.append(threading.current_thread())

    monkeypatch.setattr(FakePrompts, "read_ahead", read_ahead)
    monkeypatch.setattr(PacedReads, "run", lambda reads, work: asyncio.to_thread(work))
    monkeypatch.setattr(trainings, "cut_files", cut)
    await train(tmp_path, [5], SHAPE)
    assert [one is threading.main_thread() for one in threads] == [True, False, False]


# ── weights of a replica ───────────────────────────────────────────────────────────────────────


@examples(30)
@given(
    deaths=st.lists(st.integers(0, 400), max_size=4),
    every=st.integers(0, 3),
    mixed=st.booleans(),
    **shapes,
)
def test_with_weights_of_a_replica_each_sample_is_trained_once_too(
    deaths: list[int], every: int, mixed: bool, **shape: Any
) -> None:
    with tempfile.TemporaryDirectory() as name:
        given: dict[str, Any] = {"recovery": "replica", "every": every, "mixed": mixed}
        asyncio.run(train(Path(name), deaths, shape, **given))
        found, rows = audit(Path(name)), trained_rows(Path(name))
    assert rows == list(range(1, shape["steps"] + 1))
    assert (found.lost, found.duplicated, found.steps) == ((), (), shape["steps"])


async def dies_after(version: int, folder: Path, **given: Any) -> Mortal:
    """A run without periodic checkpoints whose trainer dies once the replicas have the version."""
    note = Checkpointer.note
    running: list[Mortal] = []

    def noted(made: Checkpointer, cut: Cut) -> None:
        note(made, cut)
        (stages,) = running
        if cut.version == version and not stages.rewinds:
            asyncio.get_running_loop().create_task(verified(stages))

    async def verified(stages: Mortal) -> None:
        while stages.verified_version != version:
            await settle(1)
        stages.die()

    def supervise(stages: Mortal, *given: Any) -> Any:
        running[:] = [stages]
        return stages.world.pipeline.stages.supervise(*given)

    with (
        patch.object(Checkpointer, "note", noted),
        patch.object(Mortal, "supervise", supervise, create=True),
    ):
        return await train(folder, [], SHAPE, recovery="replica", every=0, **given)


async def test_the_trainer_goes_on_from_the_version_that_a_replica_has(tmp_path: Path) -> None:
    stages = await dies_after(2, tmp_path)
    log = (tmp_path / "run.log").read_text()
    assert "has the weights of version 2 from student/0 (bfloat16), and no moments" in log
    assert "the run goes on after step 4" in log
    assert (stages.rewinds, stages.synced[-2:]) == (1, [(2, True), (3, False)])
    start = Checkpoints(tmp_path / "checkpoints", 2).newest(pytest.fail)
    assert start is not None
    first, second = start.cut.lineage
    assert (first.after, first.replica, second.after) == (0, "", 4)
    assert second.replica == "student/0 (bfloat16)"
    assert second.id in log
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["checkpoint/from_replica"] == 1
    found = audit(tmp_path)
    assert (found.lost, found.duplicated, found.steps) == ((), (), 6)


async def test_without_whole_weights_of_a_version_the_run_goes_on_from_the_checkpoint(
    tmp_path: Path,
) -> None:
    await dies_after(2, tmp_path, mixed=True)
    log = (tmp_path / "run.log").read_text()
    assert "no weights of version 2 for the trainer: student/0 has others" in log
    assert "the run goes on after step 0" in log


async def test_before_any_weights_are_verified_the_values_seen_are_reported(tmp_path: Path) -> None:
    await train(tmp_path, [5], SHAPE, recovery="replica", every=0)
    assert (
        "the run goes on without a replica's weights: the verified version is none, "
        "versions with a cut are none, the newest checkpoint is none"
    ) in (tmp_path / "run.log").read_text()


async def test_weights_that_are_not_newer_than_the_checkpoint_are_not_asked_for(
    tmp_path: Path,
) -> None:
    made = Mortal(SHAPE, None)
    made.world.sync.verified = 2
    lines: list[str] = []
    store: Any = SimpleNamespace()
    checkpointer = Checkpointer(store, made.trainer, config="", timeout_s=1, notify=lines.append)
    for version in (1, 2):
        checkpointer.note(replace(made.world.pipeline.run_state.cut(Captured(0)), version=version))
    start: Any = SimpleNamespace(cut=SimpleNamespace(step=0), folder=tmp_path / "step_0")
    assert await Recovery(checkpointer, made, lines.append).fetch(start) is None
    assert lines == [
        "the run goes on without a replica's weights: the verified version is 2, "
        "versions with a cut are 1 (step 0), 2 (step 0), the newest checkpoint is step_0"
    ]


async def test_what_a_recovery_waits_for_has_a_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    named, on = list[str](), Waits.on

    def noted(waits: Waits, what: str, *given: Any) -> Any:
        named.append(what)
        return on(waits, what, *given)

    monkeypatch.setattr(Waits, "on", noted)
    await dies_after(2, tmp_path)
    assert {"a replica's weights", "the trainer to take a replica's weights"} <= {*named}


@pytest.mark.parametrize("part", ["write_verified", "adopt"])
async def test_a_head_that_is_lost_in_a_recovery_ends_the_run_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, part: str
) -> None:
    """Long before the bound of the wait for the replica, or for the trainer."""
    running: list[Mortal] = []
    rewind = Training._rewind

    async def loses(training: Training, *given: Any) -> None:
        stages: Any = training.stages
        running.append(stages)
        await rewind(training, *given)

    async def hang(*_: Any) -> None:
        running[-1].head_is_lost.set()
        await asyncio.Event().wait()

    monkeypatch.setattr(Training, "_rewind", loses)
    monkeypatch.setattr(Mortal if part == "write_verified" else FakeTrainer, part, hang)
    with pytest.raises(HeadLost):
        await asyncio.wait_for(dies_after(2, tmp_path), 15)
    assert [stages.rewinds for stages in running] == [int(part == "adopt")]


async def test_cuts_from_before_a_rollback_are_forgotten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    degenerate(monkeypatch, at=8, until=0.25)
    note, rewind = Checkpointer.note, Mortal.rewind
    left: list[dict[int, Cut]] = []
    noted: list[Checkpointer] = []

    def noting(made: Checkpointer, cut: Cut) -> None:
        noted.append(made)
        note(made, cut)

    async def rewound(stages: Mortal, error: ProcessDied) -> None:
        left.append(dict(noted[-1].noted))
        await rewind(stages, error)

    monkeypatch.setattr(Checkpointer, "note", noting)
    monkeypatch.setattr(Mortal, "rewind", rewound)
    await train(tmp_path, [], LONG, recovery="replica")
    assert left == [{}, {}]


async def test_a_trainer_that_does_not_take_the_weights_is_built_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def refuses(*_: Any) -> None:
        raise StageError("trainer", "weights of another model")

    monkeypatch.setattr(FakeTrainer, "adopt", refuses)
    await goes_on_without(tmp_path, "weights of another model")


async def test_a_checkpoint_of_a_replicas_weights_that_is_damaged_is_not_where_the_run_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit = Checkpoints.commit

    def damages(store: Checkpoints, part: Path, cut: Cut, *given: Any) -> Path:
        folder = commit(store, part, cut, *given)
        if cut.lineage[-1].replica:
            (folder / "trainer.json").write_text("")
        return folder

    monkeypatch.setattr(Checkpoints, "commit", damages)
    await goes_on_without(tmp_path, "the newest checkpoint is none")
    assert (tmp_path / "checkpoints/step_4.damaged").is_dir()


async def test_a_disk_that_fails_while_the_trainer_takes_a_replicas_weights_does_not_end_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    adopt, newest, adopted = FakeTrainer.adopt, Checkpoints.newest, list[int]()

    async def adopts(trainer: FakeTrainer, directory: str, step: int, version: int) -> None:
        adopted.append(step)
        await adopt(trainer, directory, step, version)

    def fails(store: Checkpoints, notify: Any) -> Any:
        if adopted:
            adopted.clear()
            raise OSError("stale file handle")
        return newest(store, notify)

    monkeypatch.setattr(FakeTrainer, "adopt", adopts)
    monkeypatch.setattr(Checkpoints, "newest", fails)
    await goes_on_without(tmp_path, "stale file handle")
    assert (tmp_path / "checkpoints/step_4.left").is_dir()  # files are cut to another size


async def goes_on_without(folder: Path, cause: str) -> None:
    """A run whose recovery from a replica's weights fails goes on from its checkpoint."""
    stages = await dies_after(2, folder)
    log = (folder / "run.log").read_text()
    assert re.search(f"the run goes on without a replica's weights: trainer: .*{cause}", log)
    assert stages.rewinds == 2
    assert "the run goes on after step 0" in log
    assert "checkpoint/from_replica" not in json.loads((folder / "summary.json").read_text())
    start = Checkpoints(folder / "checkpoints", 2).newest(pytest.fail)
    assert start is None or not any(one.replica for one in start.cut.lineage)


# ── rollbacks ──────────────────────────────────────────────────────────────────────────────────

LIMITS = {"mode": "roll_back", "window": 1, "max_roll_backs": 2}
LONG = SHAPE | {"steps": 12, "guardrail": LIMITS}


def degenerate(monkeypatch: pytest.MonkeyPatch, at: int, until: float) -> None:
    """Responses are cut off at step ``at`` unless the learning rates' factor is ``until``."""
    step = FakeTrainer.step

    async def report(trainer: FakeTrainer) -> Any:
        done = await step(trainer)
        bad = done.step == at and trainer.lr_factor > until
        return replace(done, metrics=FORM | {"train/truncated_share": float(bad), "loss/total": 1})

    monkeypatch.setattr(FakeTrainer, "step", report)


async def test_a_run_that_degenerates_goes_back_with_a_lower_rate_and_trains_each_sample_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    degenerate(monkeypatch, at=8, until=0.25)
    stages = await train(tmp_path, [], LONG)
    assert (stages.rewinds, stages.world.trainer.lr_factor) == (2, 0.25)
    found = audit(tmp_path)
    assert (found.lost, found.duplicated, found.steps) == ((), (), 12)


async def test_the_run_goes_back_to_before_the_window_that_exceeds_the_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    degenerate(monkeypatch, at=8, until=0.5)
    removed_after: list[int] = []
    monkeypatch.setattr(Checkpoints, "roll_back", lambda _, step: removed_after.append(step))
    await train(
        tmp_path, [], LONG | {"guardrail": LIMITS | {"window": 3, "max_truncated_share": 0.4}}
    )
    assert removed_after == [8 - 3]


async def test_with_few_checkpoints_a_run_still_goes_back_before_the_window(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    degenerate(monkeypatch, at=9, until=0.5)
    take = Checkpointer.take

    async def never_skipped(made: Checkpointer, cut_of: Any) -> None:
        await made.settled()
        await take(made, cut_of)

    monkeypatch.setattr(Checkpointer, "take", never_skipped)
    limits = LIMITS | {"window": 5, "max_truncated_share": 0.3}
    stages = await train(tmp_path, [], LONG | {"guardrail": limits}, keep=1)
    assert stages.rewinds == 1
    (back,) = re.findall(r"the run goes on after step (\d+)", (tmp_path / "run.log").read_text())
    assert int(back) == 2  # the oldest one; step 4 is neither it nor the newest any more


@pytest.mark.slow
async def test_a_checkpoint_that_hangs_when_the_run_goes_back_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    degenerate(monkeypatch, at=8, until=0.5)
    write = FakeTrainer.checkpoint

    async def hangs(trainer: FakeTrainer, *args: Any) -> Any:
        if trainer.lr_factor == 1:
            await asyncio.Event().wait()
        return await write(trainer, *args)

    monkeypatch.setattr(FakeTrainer, "checkpoint", hangs)
    await train(tmp_path, [], LONG | {"life_s": 5})
    assert Checkpoints(tmp_path / "checkpoints", 2).steps()[-1] == 12


async def test_a_rewound_pipeline_takes_no_checkpoint(tmp_path: Path) -> None:
    stages = Mortal(SHAPE, None)
    pipeline = stages.world.pipeline
    pipeline.rewound = True
    with pytest.raises(CheckpointError, match="the run is being rewound"):
        await pipeline.checkpoint()


async def test_until_the_trainer_is_restored_neither_a_checkpoint_nor_a_model_is_written() -> None:
    made = Mortal(SHAPE, None).world
    start: Any = SimpleNamespace(cut=made.pipeline.run_state.cut(Captured(0)), folder="x")
    made.pipeline.start = start
    made.pipeline.__post_init__()
    assert not made.pipeline.has_weights
    with pytest.raises(CheckpointError, match="nothing is restored yet"):
        await made.pipeline.checkpoint()


async def test_a_run_that_degenerates_once_too_often_ends_with_what_was_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    degenerate(monkeypatch, at=8, until=0.0)
    with pytest.raises(GuardrailExceeded, match="step 8: 100% of the responses are cut off"):
        await train(tmp_path, [], LONG)
    assert len(read_roll_backs(tmp_path)) == 2


async def test_a_trainer_that_dies_after_a_rollback_keeps_the_lower_learning_rate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    add_roll_back(tmp_path, RollBack(3, "cut off"))
    stages = await train(tmp_path, [40], LONG)
    assert (stages.rewinds, stages.world.trainer.lr_factor) == (1, 0.5)
