"""The whole pipeline in one process on fakes, behind the same Protocols as the Ray proxies."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from async_opd.core.batch import Batch
from async_opd.core.errors import NoReplica, StageError, StageTimeout
from async_opd.core.reports import Events, Progress, StepReport, SyncReport
from async_opd.core.samples import DeadLetter, Header, Prompt, Rollout, VersionSpan
from async_opd.core.stages import DEAD, SCORED, SamplingSpec
from async_opd.grading.graders import GradeError
from async_opd.observability.metric_catalogue import unknown
from async_opd.waiting.waits import Waits
from tests.conftest import make_rollout
from tests.properties import examples
from tests.world.clock import ManualTimer, Pace, Straggling, settle
from tests.world.config import changed
from tests.world.faults import Faults
from tests.world.prompts import TEACHERS, FakePrompts, pictured
from tests.world.queue import message_queue
from tests.world.run import (
    World,
    assert_each_trained_once,
    evaluated_world,
    evaluation,
    finished,
    shapes,
    world,
)
from tests.world.trainer import Disk
from trainer.batches.batch_metrics import masked_tokens
from trainer.batches.token_weights import TokenWeighting


async def test_every_admitted_sample_is_trained_and_no_image_is_held_when_the_run_ends() -> None:
    run = await world().run()
    stats = await run.queue.media_stats()
    assert run.trainer.steps == 6
    assert run.counts == {"in_flight": 0, "trained": 24, "dead_lettered": 0, "requeued": 0}
    assert stats.added_bytes > 0
    assert (stats.images, run.pipeline.run_state.images.held_bytes) == (0, 0)


async def test_an_image_is_put_once_for_all_rollouts_of_its_prompt() -> None:
    run = world(steps=1, batch_size=4, n=4, s=0.0, k=1)  # p0 has no image, p1 has one
    keep, put = run.queue.keep_media, list[str]()

    async def counted(owned: Any, complete: bool = False, encoded: Any = None) -> Any:
        put.extend(encoded or ())
        return await keep(owned, complete, encoded)

    run.queue.keep_media = counted
    run.pipeline.prompts.next(1)
    await run.run()
    assert put == [FakePrompts().find("p1").media[0].sha256]


async def test_every_evaluated_version_has_a_checkpoint_however_slow_the_disk_is() -> None:
    run = world(steps=6, k=1)
    kept = {"keep_best": "eval/a/accuracy", "every": 1}
    config = changed(run.pipeline.config, checkpoint=kept, eval={"every": 2})
    slow = Disk(run.trainer, slow=True)
    run.rewire(config=config, checkpointer=slow)
    await run.run()
    assert slow.taken == [1, 2, 4, 6]


async def test_checkpoints_every_so_many_steps_are_taken_within_a_version_too() -> None:
    run = world(steps=10, k=4)
    disk = Disk(run.trainer, slow=False)
    run.rewire(
        config=changed(run.pipeline.config, checkpoint={"every_steps": 3}), checkpointer=disk
    )
    await run.run()
    assert disk.taken == [3, 6, 9, 10]


async def test_the_last_weights_reach_the_replicas() -> None:
    run = await world(steps=5, k=2).run()
    assert [student.version for student in run.students] == [3, 3]


# ── how a run ends before its time ─────────────────────────────────────────────────────────────


def student_dies(run: World) -> None:
    run.students[0].fail_at = 3


def teacher_dies(run: World) -> None:
    run.teachers["a"].dead = True


def half_cannot_be_scored(run: World) -> None:
    run.teachers["a"].poison = frozenset(f"p{index}/0" for index in range(0, 100, 2))


def sync_fails(run: World) -> None:
    run.sync.fail = True


def trainer_hangs(run: World) -> None:
    run.trainer.hang = True


def stage_loop_ends(run: World) -> None:
    async def ends() -> None: ...

    run.scorer.run = ends  # type: ignore[method-assign]


def grader_fails(run: World, *of: str) -> None:
    """For these rollouts, or for all."""

    async def grade(rollout: Rollout) -> Rollout:
        if not of or rollout.uid in of:
            raise GradeError("grader", f"rollout {rollout.uid}: it raised")
        return rollout

    for student in run.students:
        student.grade = grade  # type: ignore[method-assign]


def responses_are_cut_off(run: World) -> None:
    form = {"truncated_share": 0.9, "repetition": 0.0, "mean_response_tokens": 4.0}
    run.trainer.metrics = {f"train/{name}": value for name, value in form.items()}


@pytest.mark.parametrize(
    ("fault", "sizes", "error", "cause"),
    [
        (student_dies, {"replicas": 1}, StageError, "student/0: its process died"),
        (teacher_dies, {}, NoReplica, r"teacher a: all 1 replicas are gone.* its process died"),
        (
            half_cannot_be_scored,
            {"share": 0.001},
            StageError,
            r"2 rollouts of teacher a are .* allowed are 1 \(0.001 of 1000\).* cannot score",
        ),
        (
            grader_fails,
            {"groups": True},
            StageError,
            r"11 rollouts of teacher . are dead letters.* it raised",
        ),
        (sync_fails, {"s": 0.0}, StageError, "the broadcast failed"),
        (stage_loop_ends, {}, StageError, "scorer: its loop ended"),
        (trainer_hangs, {"stall_s": 0.01}, StageTimeout, "a batch of scored samples"),
        (
            responses_are_cut_off,
            {"guardrail": {"mode": "stop", "window": 1}},
            StageError,
            r"guardrail: step 1: 90% of the responses are cut off",
        ),
    ],
)
async def test_a_fault_that_nothing_mends_ends_the_run_with_its_name_and_cause(
    fault: Callable[[World], None], sizes: Any, error: type[Exception], cause: str
) -> None:
    run = world(**sizes)
    fault(run)
    with pytest.raises(error, match=cause):
        await run.run(5)


@pytest.mark.parametrize("seed", range(4))
async def test_the_last_events_of_a_teacher_are_logged_before_its_error_ends_the_run(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = world(seed)
    teacher_dies(run)
    events = run.scorer.events

    async def slow(seen: int, wait: bool = True) -> Events:
        """The error overtakes the answer, as between processes."""
        answer = await events(seen, wait)
        await settle(20)
        return answer

    monkeypatch.setattr(run.scorer, "events", slow)
    with pytest.raises(NoReplica):
        await run.run(5)
    lines = [line.partition(":")[0] for line in run.log.lines if line.startswith("teacher")]
    assert lines == ["teacher a/0 is ejected", "teacher a/0 is gone for good"]


async def never(seen: int, wait: bool = True) -> Events:
    return await asyncio.get_running_loop().create_future()


@pytest.mark.parametrize("hangs", [False, True])
async def test_a_rollouter_that_is_gone_hides_no_last_events_of_the_scorer(
    hangs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("async_opd.observability.run_log.LAST_EVENTS_S", 0.01)
    run = world()
    teacher_dies(run)
    events = run.scorer.events

    async def gone(seen: int, wait: bool = True) -> Events:
        if wait or hangs:
            return await never(seen)
        raise StageError("rollouter", "its process died")

    async def only_when_asked(seen: int, wait: bool = True) -> Events:
        return await (never(seen) if wait else events(seen, wait))

    monkeypatch.setattr(run.rollouter, "events", gone)
    monkeypatch.setattr(run.scorer, "events", only_when_asked)
    with pytest.raises(NoReplica):
        await run.run(5)
    assert any(line.startswith("teacher a/0 is gone for good") for line in run.log.lines)


async def test_last_events_are_asked_of_all_stages_at_the_same_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run, asked, all_asked = world(), set[int](), asyncio.Event()
    teacher_dies(run)
    stages = (run.rollouter, run.scorer, run.queue)
    for at, stage in enumerate(stages):

        async def together(
            seen: int, wait: bool = True, at: int = at, events: Any = stage.events
        ) -> Any:
            if wait:
                return await never(seen)
            asked.add(at)
            if len(asked) == len(stages):
                all_asked.set()
            await all_asked.wait()
            return await events(seen, wait)

        monkeypatch.setattr(stage, "events", together)
    with pytest.raises(NoReplica):
        await run.run(5)
    assert any(line.startswith("teacher a/0 is gone for good") for line in run.log.lines)


async def test_a_failing_run_that_waits_for_last_events_says_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("async_opd.observability.run_log.LAST_EVENTS_S", 600)
    run, timer, asked = world(replicas=1), ManualTimer(), asyncio.Event()
    student_dies(run)

    async def hangs(seen: int, wait: bool = True) -> Events:
        if not wait:
            asked.set()
        return await never(seen)

    monkeypatch.setattr(run.scorer, "events", hangs)
    run.rewire(waits=Waits(run.log.message, timer, timer.clock))
    async with asyncio.TaskGroup() as group:
        ending = group.create_task(run.run(5))
        await asked.wait()
        await timer.passes(10)
        ending.cancel()
    assert run.log.lines[-1].startswith("waiting for the last events of the stages (")


async def test_a_scorer_that_does_not_answer_holds_up_no_failing_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("async_opd.observability.run_log.LAST_EVENTS_S", 0.01)
    run = world(replicas=1)
    student_dies(run)
    monkeypatch.setattr(run.scorer, "events", never)
    with pytest.raises(StageError, match="student/0: its process died"):
        await run.run(5)


async def test_a_run_whose_replicas_generate_is_not_a_stall() -> None:
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
    await run.run()
    assert run.trainer.steps == 6


async def test_a_cancelled_run_leaves_no_task_behind() -> None:
    run = world()
    trainer_hangs(run)
    task = asyncio.create_task(run.pipeline.run())
    await settle(200)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await asyncio.sleep(0)
    assert [t for t in asyncio.all_tasks() if t is not asyncio.current_task()] == []


# ── dead letters ───────────────────────────────────────────────────────────────────────────────


async def test_rollouts_that_no_teacher_can_score_are_replaced_and_recorded() -> None:
    run = world()
    run.teachers["a"].poison = frozenset({"p0/0", "p4/1"})
    await run.run()
    assert sorted(run.log.dead) == ["p0/0", "p4/1"]
    assert (run.counts["trained"], run.counts["dead_lettered"]) == (24, 2)
    assert run.counts["in_flight"] == 0


async def test_with_a_reward_a_rollout_that_cannot_be_scored_is_sampled_again() -> None:
    run = world(groups=True)
    score, failed = run.teachers["a"].score, []

    async def fails_for_a_while(batch: Batch) -> Batch:
        if any(header.uid == "p0/0" for header in batch.headers) and len(failed) < 4:
            failed.append(1)
            raise StageError("teacher a/0", "cannot score")
        return await score(batch)

    run.teachers["a"].score = fails_for_a_while  # type: ignore[method-assign]
    await run.run()
    assert (run.log.dead, run.counts["requeued"]) == ([], 1)
    assert_each_trained_once(run, 6)


async def test_with_a_reward_a_group_that_cannot_be_completed_is_replaced_by_another() -> None:
    run = world(groups=True)
    run.teachers["a"].poison = frozenset({"p0/0"})
    await run.run()
    assert sorted(run.log.dead) == ["p0/0", "p0/1"]
    assert not {"p0/0", "p0/1"} & {uid for uid, _ in run.trainer.trained}
    assert_each_trained_once(run, 6)
    assert await run.trainer.batcher.copy_held() == ()


async def test_rollouts_that_cannot_be_graded_are_replaced_and_recorded() -> None:
    run = world()
    grader_fails(run, "p0/0", "p3/1")
    await run.run()
    assert sorted(run.log.dead) == ["p0/0", "p3/1"]
    assert run.log.rows[-1]["dead_letters/grader"] == 2
    assert_each_trained_once(run, 6)


@pytest.mark.parametrize("lost_too", [False, True])
async def test_a_step_that_was_left_out_ends_its_samples_once_also_if_copies_are_lost(
    lost_too: bool,
) -> None:
    run = world(share=float(lost_too))
    step = run.trainer.step

    async def third_is_left_out() -> StepReport:
        report = await step()
        if report.step != 3:
            return report
        if lost_too:
            await lose(run, [header.uid for header in report.trained])
        return replace(report, skipped="loss nan")

    run.trainer.step = third_is_left_out  # type: ignore[method-assign]
    await run.run()
    assert (run.counts["trained"], run.counts["dead_lettered"]) == (20, 4)
    assert (run.counts["in_flight"], len(run.log.dead)) == (0, 4)


async def test_a_note_of_the_trainer_is_in_the_runs_log() -> None:
    run = world()
    step = run.trainer.step

    async def noted() -> StepReport:
        report = await step()
        return replace(report, notes=("it runs eagerly",)) if report.step == 2 else report

    run.trainer.step = noted  # type: ignore[method-assign]
    await run.run()
    assert run.log.lines.count("trainer: it runs eagerly") == 1


async def lose(run: World, uids: Sequence[str], times: int = 1) -> None:
    """Copies of these rollouts cannot be scored by any teacher."""
    letters = [
        DeadLetter(Header(uid, 6, 0, 0, TEACHERS[int(uid[1]) % 2]), "cannot be scored")
        for uid in uids
    ]
    await run.queue.put(DEAD, Batch.pack(letters * times))
    await settle(200)


@pytest.mark.parametrize("groups", [False, True])
async def test_a_copy_that_is_lost_while_the_other_one_is_trained_changes_nothing(
    groups: bool,
) -> None:
    run = world(groups=groups)
    take = run.trainer.batcher.take

    async def lost_meanwhile(version: int) -> Any:
        taken = await take(version)
        await lose(run, [header.uid for header in taken.headers], times=3)
        return taken

    run.trainer.batcher.take = lost_meanwhile  # type: ignore[method-assign]
    await run.run()
    assert (run.counts["trained"], run.counts["dead_lettered"]) == (24, 0)
    assert run.log.dead == []


async def test_a_copy_that_is_lost_while_the_trainer_holds_the_other_one_changes_nothing() -> None:
    run = world(batch_size=4, n=1)
    receive, held = run.trainer.batcher._receive, list[str]()

    async def lost_meanwhile() -> None:
        await receive()
        if not held:
            held.extend(s.rollout.uid for s in await run.trainer.batcher.copy_held())
            await lose(run, held)

    run.trainer.batcher._receive = lost_meanwhile  # type: ignore[method-assign]
    await run.run()
    assert held
    assert run.log.dead == []
    assert_each_trained_once(run, 6)


async def test_a_copy_that_comes_after_its_dead_letter_is_not_trained() -> None:
    run = world()
    put, bad = run.queue.put, {"p0/0", "p3/1"}

    async def lost_before(topic: str, batch: Batch) -> None:
        if topic == SCORED:
            await lose(run, [header.uid for header in batch.headers if header.uid in bad])
        await put(topic, batch)

    run.queue.put = lost_before
    await run.run()
    assert sorted(run.log.dead) == sorted(bad)
    assert not bad & {uid for uid, _ in run.trainer.trained}
    assert_each_trained_once(run, 6)


# ── evaluations ────────────────────────────────────────────────────────────────────────────────


async def test_accuracy_is_measured_before_during_and_after() -> None:
    graded: list[str] = []

    async def grade(rollout: Rollout) -> float:
        graded.append(rollout.uid)
        return 1.0

    run = await world(steps=4, k=1, evaluation=evaluation(grade)).run()
    before, first, *_, after = run.log.evaluated  # a version that is due meanwhile has none
    assert (before, first, after) == (0, 1, 4)
    assert len(graded) == 4 * len(run.log.evaluated)


async def test_an_evaluation_belongs_to_the_step_of_the_version_that_it_measured() -> None:
    """Training goes on while it is graded, and no weight sync waits for it."""
    synced: list[int] = []

    async def grade(rollout: Rollout) -> float:
        while run.trainer.version and run.students[0].version < 3:
            await settle(1)
        synced.append(run.students[0].version)
        return 1.0

    run = evaluated_world(grade)
    await run.run()
    assert synced[4] == 3
    assert run.log.evaluated[:2] == [0, 2]


async def test_an_evaluation_within_a_version_names_that_of_the_engines() -> None:
    run = world(steps=8, k=4, s=2.0, replicas=1, evaluation=evaluation())
    run.rewire(config=changed(run.pipeline.config, eval={"every_steps": 3}))
    await run.run()
    found = {
        step: row["eval/oldest_version"]
        for step, row in zip(run.log.steps, run.log.rows, strict=True)
        if "eval/seconds" in row
    }
    assert found == {3: 0, 6: 1, 8: 2}


async def test_a_version_that_is_due_during_an_evaluation_has_none_and_a_line_names_it() -> None:
    async def grade(rollout: Rollout) -> float:
        while 0 < run.trainer.steps < 8:
            await settle(1)
        return 1.0

    run = evaluated_world(grade)
    await run.run()
    assert run.log.evaluated == [0, 2, 8]
    skipped = [line.split(":")[0] for line in run.log.lines if "no evaluation" in line]
    assert skipped == ["step 4", "step 6"]


async def test_an_evaluation_belongs_to_the_oldest_version_of_its_answers() -> None:
    """All of its requests waited while the next version was pushed."""
    run = evaluated_world()
    generate = run.rollouter.generate

    async def late(*asked: Any) -> list[Rollout]:
        while run.trainer.version and run.pipeline.run_state.admission.version < 2:
            await settle(1)
        return await generate(*asked)

    run.rollouter.generate = late  # type: ignore[method-assign]
    await run.run()
    assert run.log.evaluated[:2] == [0, 4]


async def test_an_evaluation_that_is_cancelled_writes_no_file_afterwards() -> None:
    begun, go_on, ended = threading.Event(), threading.Event(), threading.Event()

    def record(name: str, result: Any) -> None:
        begun.set()
        assert go_on.wait(20)
        ended.set()

    run = evaluated_world()
    run.rewire(evaluation=replace(evaluation(), record=record))
    work = asyncio.create_task(run.pipeline.run())
    await asyncio.to_thread(begun.wait, 20)
    work.cancel()
    asyncio.get_running_loop().call_later(0.05, go_on.set)
    await asyncio.wait({work})
    assert ended.is_set()


async def test_an_evaluation_by_replicas_that_have_later_weights_belongs_to_these() -> None:
    """Separate replicas may get the weights of a sync that is still under way for the others."""
    run = evaluated_world()
    generate = run.rollouter.generate

    async def ahead(*asked: Any) -> list[Rollout]:
        version = run.pipeline.run_state.admission.version
        found = await generate(*asked)
        later = (VersionSpan(2, 0, 4),)
        return [replace(one, version_spans=later) for one in found] if version == 1 else found

    run.rollouter.generate = ahead  # type: ignore[method-assign]
    await run.run()
    assert run.log.evaluated[:2] == [0, 4]


async def test_a_version_that_is_measured_before_its_push_ends_is_not_evaluated_again() -> None:
    run = evaluated_world()
    generate, push = run.rollouter.generate, run.sync.push

    async def ahead(*asked: Any) -> list[Rollout]:
        """The replicas of evaluations have the newest snapshot."""
        while run.pipeline.run_state.admission.version == 1 == run.trainer.version:
            await settle(1)
        later = (VersionSpan(run.trainer.version, 0, 4),)
        return [replace(one, version_spans=later) for one in await generate(*asked)]

    async def slow() -> SyncReport:
        while run.trainer.version == 2 and 4 not in run.log.evaluated:
            await settle(1)
        return await push()

    run.rollouter.generate = ahead  # type: ignore[method-assign]
    run.sync.push = slow  # type: ignore[method-assign]
    await run.run()
    assert run.log.evaluated[:2] == [0, 4]
    assert run.log.evaluated == sorted(set(run.log.evaluated))
    named = [line for line in run.log.lines if "no evaluation" in line]
    why = "its engines had the weights after step 4 by then"
    assert named[0] == f"step 2: no evaluation, since {why}"


async def test_the_checkpointer_knows_which_step_is_being_evaluated() -> None:
    asked: list[int | None] = []

    async def grade(rollout: Rollout) -> float:
        asked.append(disk.evaluating())
        return 1.0

    run = evaluated_world(grade)
    disk: Any = Disk(run.trainer, slow=True)
    run.rewire(checkpointer=disk)
    await run.run()
    assert asked[::4][:2] == [0, 2]
    assert disk.evaluating() is None


async def test_an_evaluation_whose_answers_are_of_several_versions_names_them() -> None:
    run = evaluated_world()
    (student,) = run.students
    answer = student.generate

    async def slow(prompts: Sequence[Prompt], sampling: SamplingSpec) -> list[Rollout]:
        version = student.version
        found = await answer(prompts, sampling)
        while version == 1 == student.version:
            await settle(1)
        spans = (VersionSpan(version, 0, 2), VersionSpan(student.version, 2, 4))
        return [replace(one, version_spans=spans) for one in found]

    student.generate = slow  # type: ignore[method-assign]
    await run.run()
    assert any(line.startswith("step 2, versions 1 to 2: eval/a 100.0%") for line in run.log.lines)


async def test_a_queue_that_dies_during_an_evaluation_gets_its_images_again() -> None:
    """Before training of the student and the teachers, and beside it."""
    run = evaluated_world()
    shown = replace(evaluation(), prompts=tuple(map(pictured, range(4))))
    run.rewire(config=changed(run.pipeline.config, eval={"teachers": True}), evaluation=shown)
    (student,), deaths = run.students, []
    answer = student.generate

    async def struck(prompts: Sequence[Prompt], sampling: SamplingSpec) -> list[Rollout]:
        run.queue.die()
        deaths.append(run.trainer.steps)
        await settle(100)  # supervision has issued all again
        return await answer(prompts, sampling)

    for replica in (student, *run.teachers.values()):
        replica.generate = struck  # type: ignore[method-assign]
    await run.run()
    assert {"eval_initial/a/accuracy", "eval/b/accuracy"} <= run.log.summary.keys()
    assert "eval_teacher/a/accuracy" in run.log.keys
    assert deaths[:3] == [0, 0, 0]
    assert any(0 < steps < 8 for steps in deaths)
    assert (await run.queue.media_stats()).images == 0


@pytest.mark.parametrize("before", [True, False])
async def test_the_summary_has_accuracy_before_and_after(before: bool) -> None:
    run = await world(evaluation=evaluation(), before=before).run()
    assert run.log.summary.get("eval_initial/a/accuracy") == (1.0 if before else None)
    assert run.log.summary["eval/b/accuracy"] == 1.0


async def test_every_metric_of_a_run_is_in_the_catalogue() -> None:
    run = world(evaluation=evaluation(), max_lag=0)
    run.teachers["a"].poison = frozenset({"p0/0"})
    await run.run()
    assert {"loss/total", "teacher/a/busy", "eval/a/accuracy"} <= run.log.keys
    assert unknown(run.log.keys) == []


async def test_an_expired_lease_has_a_line_in_the_log() -> None:
    timer = ManualTimer()
    run = world()
    run.queue.now = queue = message_queue(timer=timer)
    await queue.put("rollouts/a", Batch.pack([make_rollout("lost/0", "a")]))
    await queue.get("rollouts/a", 1, consumer="somebody")
    timer.advance(60)
    with suppress(StageError):  # nobody has admitted it
        await run.run()
    (line,) = (line for line in run.log.lines if "went back" in line)
    assert line.startswith("topic rollouts/a: 1 samples went back: somebody took them")


# ── properties ─────────────────────────────────────────────────────────────────────────────────


async def test_on_policy_means_that_every_token_of_a_batch_is_of_its_version() -> None:
    run = await world(s=0.0, k=1).run()
    versions = dict(started for student in run.students for started in student.started)
    assert all(versions[uid] == version for uid, version in run.trainer.trained)


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


def ages(made: World, max_lag: int) -> list[tuple[int, bool]]:
    """Of every token that the trainer took: how many versions old it was, and whether masked."""
    found = []
    for rollout, (_, version) in zip(made.trainer.rollouts, made.trainer.trained, strict=True):
        masked = masked_tokens(rollout, TokenWeighting(max_lag=max_lag).oldest(version)).tolist()
        for span in rollout.version_spans:
            found += [(version - span.version, one) for one in masked[span.start : span.end]]
    return found


@examples(40)
@given(**shapes, max_lag=st.integers(0, 2))
def test_whatever_straggles_a_mask_trains_each_sample_once_and_no_token_beyond_the_bound(
    max_lag: int, **shape: Any
) -> None:
    made = finished(**shape, pace=Straggling(shape["seed"]))
    assert_each_trained_once(made, shape["steps"])
    assert made.counts["requeued"] == 0
    assert all(masked == (age > max_lag) for age, masked in ages(made, max_lag))


def test_tokens_that_straggle_beyond_the_bound_are_masked() -> None:
    made = finished(seed=1, steps=12, s=1.0, k=1, n=1, pace=Straggling(1))
    assert {masked for _, masked in ages(made, 0)} == {True, False}


def test_samples_that_straggle_beyond_the_bound_run_again_and_are_counted() -> None:
    made = finished(seed=1, steps=12, s=1.0, k=1, n=1, max_lag=0, pace=Straggling(1))
    assert made.counts["requeued"] > 0
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
        return await made.run()

    assert_each_trained_once(asyncio.run(run()), shape["steps"])


@examples(60)
@given(**shapes, deaths=st.lists(st.integers(0, 60), min_size=1, max_size=4))
def test_a_queue_that_dies_loses_nothing_and_doubles_nothing(
    deaths: list[int], **shape: Any
) -> None:
    async def run() -> World:
        made = world(**shape, pace=Straggling(shape["seed"]))
        with Faults(strokes=tuple((pause, "queue") for pause in deaths)).striking(
            lambda: made.queue
        ):
            return await made.run()

    made = asyncio.run(run())
    assert_each_trained_once(made, shape["steps"])
    assert made.counts["in_flight"] == 0


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
            teacher.poison = frozenset(f"p{prompt}/{member}" for prompt, member in poison)
        return await made.run()

    made = asyncio.run(run())
    assert_each_trained_once(made, shape["steps"])
    assert not {uid for uid, _ in made.trainer.trained} & set(made.log.dead)
    assert made.counts["in_flight"] == 0
