"""The cold start on fakes: which answers are trained, what is left out, and when it gives up."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from async_opd.cold_start import ColdStart
from async_opd.config.load import load_config
from async_opd.config.sections.data import ColdStartConfig
from async_opd.core.batch import Batch, unpack
from async_opd.core.errors import CheckpointError, RolloutFault, StageError, StageTimeout
from async_opd.core.row import Row
from async_opd.core.samples import DeadLetter, Prompt, Rollout, Sample
from async_opd.core.stages import SamplingSpec
from async_opd.data.answers import GivenAnswers
from async_opd.models.tokenizer import Text
from async_opd.run_prompts import cold_start_of
from tests.waiting.test_reading_thread import STALL_S, hang_for, hanging_reading, hanging_source
from tests.world.clock import Pace, PacedReads
from tests.world.log import FakeLog
from tests.world.run import evaluated_world, world
from tests.world.trainer import Disk

RATE = 0.5
READS: Any = PacedReads(Pace(0))
EXAMPLE = Path(__file__).parents[1] / "examples" / "quickstart.yaml"
ROWS = [Row("0:0", "sort", "sort 123456=", "123456", {})]


class Rows:
    """Prompts 0, 1, 2 … for two teachers by turns; those in ``bad`` are dead letters."""

    def __init__(self, bad: Sequence[int] = (), unanswered: Sequence[int] = ()) -> None:
        self.bad, self.unanswered, self.taken = bad, unanswered, 0

    def next(self, count: int) -> list[Prompt | DeadLetter]:
        first, self.taken = self.taken, self.taken + count
        return [self.one(number) for number in range(first, self.taken)]

    def one(self, number: int) -> Prompt | DeadLetter:
        answer = None if number in self.unanswered else str(number % 10)
        row = Row(f"0:{number}", "s", "question", answer, {})
        prompt = Prompt(f"{number}", "s", "ab"[number % 2], np.array([1], np.int32), row)
        return DeadLetter.of_prompt(prompt, "x", "prompt", "bad") if number in self.bad else prompt


class Trainer:
    def __init__(self) -> None:
        self.batches: list[list[Sample]] = []
        self.rates: list[float] = []
        self.forgotten = 0

    async def supervise(self, batches: Sequence[Batch], rate: float) -> dict[str, float]:
        await asyncio.sleep(0)
        assert not self.forgotten
        self.batches.append(unpack(Sample, batches))
        self.rates.append(rate)
        return {"loss": 1.0}

    async def forget_moments(self) -> None:
        self.forgotten += 1


class Teachers:
    def __init__(self) -> None:
        self.asked: list[tuple[str, int, SamplingSpec]] = []
        self.faulty: Sequence[str] = ()

    async def generate(
        self, teacher: str, prompts: Sequence[Prompt], sampling: SamplingSpec
    ) -> list[Rollout]:
        self.asked.append((teacher, len(prompts), sampling))
        await asyncio.sleep(0)
        fault = RolloutFault("environment", "its process died")
        return [
            Rollout.unanswered(f"{p.uid}/0", p, fault)
            if p.uid in self.faulty
            else Rollout.answer(f"{p.uid}/0", p, [ord(teacher)], "stop")
            for p in prompts
        ]


class Bounds:
    """Notes what is bounded, and for how long; bounds ``stuck`` with an error."""

    def __init__(self, stuck: str = "") -> None:
        self.stuck = stuck
        self.asked: list[tuple[str, float]] = []

    async def within(self, what: str, work: Awaitable[Any], least_s: float = 0.0) -> Any:
        self.asked.append((what, least_s))
        if what != self.stuck:
            return await work
        begun = asyncio.ensure_future(work)
        await asyncio.sleep(0)
        begun.cancel()
        raise StageTimeout("pipeline", f"waited for {what}: no new token for 9 s")


class World:
    def __init__(
        self, rows: Any = None, batch: int = 4, vocabulary: int = 1000, **config: Any
    ) -> None:
        self.bounds = Bounds()
        self.trainer, self.teachers, self.log = Trainer(), Teachers(), FakeLog()
        given = GivenAnswers(lambda text: [int(text)], 99, limit=8)
        settings = ColdStartConfig(**{"steps": 3} | config)
        more: Any = (rows or Rows(), given, vocabulary, lambda asked, _: len(asked), self.log)
        self.cold = ColdStart(settings, batch, RATE, *more, READS)

    async def run(self) -> World:
        stages: Any = self.trainer, self.teachers
        await self.cold.run(*stages, self.bounds.within)
        return self

    @property
    def responses(self) -> list[list[list[int]]]:
        batches = self.trainer.batches
        return [[one.rollout.response_ids.tolist() for one in batch] for batch in batches]


async def test_each_step_trains_a_batch_of_the_next_rows_answers() -> None:
    world = await World(batch=2).run()
    assert world.responses == [[[0, 99], [1, 99]], [[2, 99], [3, 99]], [[4, 99], [5, 99]]]


async def test_every_step_is_logged_and_the_trainer_has_a_new_optimizer_afterwards() -> None:
    world = await World().run()
    rows = [(one["cold_start/step"], one["cold_start/loss"]) for one in world.log.rows]
    assert rows == [(1.0, 1.0), (2.0, 1.0), (3.0, 1.0)]
    assert world.trainer.forgotten == 1


async def test_the_rate_rises_to_that_of_the_config() -> None:
    world = await World(steps=4, warmup_steps=2).run()
    assert world.trainer.rates == [RATE / 2, RATE, RATE, RATE]


async def test_teachers_answer_the_prompts_of_their_own_sources_as_the_config_says() -> None:
    world = await World(answers="teacher", temperature=0.5).run()
    assert world.responses[0] == [[ord("a")], [ord("a")], [ord("b")], [ord("b")]]
    assert {sampling.temperature for _, _, sampling in world.teachers.asked} == {0.5}
    assert ("answers of the cold start", 4) in world.bounds.asked  # the time of so many tokens


async def test_rows_that_cannot_be_used_are_replaced_by_the_next_ones_and_counted() -> None:
    world = await World(Rows(bad=[1], unanswered=[2]), batch=3, steps=1).run()
    assert world.responses == [[[0, 99], [3, 99], [4, 99]]]
    assert world.log.rows[-1]["cold_start/unusable_rows"] == 2
    assert [line for line in world.log.lines if "left out" in line] == [
        "cold start: a row is left out, others are counted: bad"
    ]


async def test_a_row_whose_episode_fails_is_replaced_by_the_next_one() -> None:
    world = World(batch=2, steps=1, answers="teacher")
    world.teachers.faulty = ["1"]
    await world.run()
    assert world.responses == [[[ord("a")], [ord("a")]]]
    assert world.log.rows[-1]["cold_start/unusable_rows"] == 1
    assert "its process died" in world.log.lines[1]


async def test_data_without_any_answer_end_the_run() -> None:
    with pytest.raises(StageError, match="rows without a usable answer"):
        await World(Rows(unanswered=range(1000))).run()


async def test_rows_with_tokens_that_the_student_has_no_embedding_for_are_left_out() -> None:
    world = await World(batch=2, steps=1, vocabulary=100, answers="teacher").run()
    assert world.responses == [[[ord("a")], [ord("b")]]]
    world = World(batch=2, steps=1, vocabulary=ord("b"), answers="teacher")
    await world.run()
    assert world.responses == [[[ord("a")], [ord("a")]]]
    assert "has token 98, the student 98 rows" in world.log.lines[1]


async def test_answers_that_never_come_end_the_run() -> None:
    world = World(answers="teacher")
    world.bounds.stuck = "answers of the cold start"
    with pytest.raises(StageTimeout, match="waited for answers of the cold start"):
        await world.run()


async def test_rows_that_never_come_end_the_run() -> None:
    with hanging_source() as prompts:
        world = World(prompts)
        world.cold.reading, timer = hanging_reading()
        running = asyncio.create_task(world.run())
        await hang_for(STALL_S, timer)
        with pytest.raises(StageTimeout, match="rows of the source did not come"):
            await asyncio.wait_for(running, 5)


async def test_an_error_of_the_trainer_ends_the_answers_under_way() -> None:
    world = World(answers="teacher")

    async def fails(*_: Any) -> dict[str, float]:
        raise StageError("trainer", "it hangs")

    world.trainer.supervise = fails  # type: ignore[method-assign]
    with pytest.raises(StageError, match="it hangs"):
        await world.run()
    names = {task.get_name() for task in asyncio.all_tasks()}
    assert "answers of the cold start" not in names


# ── in a pipeline ──────────────────────────────────────────────────────────────────────────────


class Cold:
    """Notes what had happened before it ran."""

    def __init__(self, run: Any) -> None:
        self.run_of, self.before = run, (-1, -1)

    async def run(self, *_: Any) -> None:
        self.before = self.run_of.trainer.steps, len(self.run_of.log.steps)


async def test_the_replicas_get_the_cold_starts_weights_before_anything_is_sampled() -> None:
    run = world()
    run.pipeline.cold_start = cold = Cold(run)  # type: ignore[assignment]
    await run.run()
    assert (cold.before, run.sync.snapshots[:2]) == ((0, 0), [(0, True), (1, False)])


@pytest.mark.parametrize(("asked", "first"), [(True, (0, True)), (False, (1, False))])
async def test_replicas_are_pushed_version_0_before_the_first_prompt_only_if_asked(
    asked: bool, first: tuple[int, bool]
) -> None:
    run = world()
    run.pipeline.pushes_first = asked
    await run.run()
    assert run.sync.snapshots[0] == first


async def test_no_checkpoint_is_taken_before_the_cold_start_is_over() -> None:
    run = world()
    run.rewire(cold_start=Cold(run))
    with pytest.raises(CheckpointError, match="the cold start is not over"):
        await run.pipeline.checkpoint()
    await run.run()
    await run.pipeline.checkpoint()


async def test_a_cold_start_has_its_checkpoint_before_the_evaluations_that_follow() -> None:
    taken_by_then: list[list[int]] = []

    async def grade(rollout: Rollout) -> float:
        taken_by_then.append([*disk.taken])
        return 1.0

    run = evaluated_world(grade)
    disk = Disk(run.trainer, slow=True)
    run.rewire(cold_start=Cold(run), checkpointer=disk)
    await run.run()
    assert taken_by_then[0] == [0]


async def test_a_resumed_run_has_no_cold_start(tmp_path: Path) -> None:
    config = load_config(EXAMPLE, ["cold_start={steps: 1}"])
    start: Any = SimpleNamespace(cut=SimpleNamespace(cursor=0))
    inputs: Any = SimpleNamespace(train=[ROWS], checked=[ROWS], eval=[], max_prompt_tokens=20)
    job: Any = SimpleNamespace(config=config, inputs=inputs, start=start, log=FakeLog())
    text = Text.of(config)
    assert cold_start_of(job, text, READS) is None
    job.start = None
    assert cold_start_of(job, text, READS) is not None
