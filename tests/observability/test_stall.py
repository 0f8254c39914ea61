"""When a run stands still: which tokens count, and how many of them may."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from async_opd.config.run_config import RunConfig
from async_opd.core.errors import StageError, StageTimeout
from async_opd.core.reports import Progress
from async_opd.observability.metering import Metering
from async_opd.observability.stall import StallDetector, most_tokens, teachers_s
from async_opd.waiting.liveness import PROBES_PER_TIMEOUT
from async_opd.waiting.waits import EVERY_S, Waits
from tests.conftest import make_prompt
from tests.world.clock import ManualTimer
from tests.world.config import run_config


def config() -> RunConfig:
    return run_config(
        data={"train": "prompts.jsonl", "max_prompt_tokens": 100},
        rollout={"max_tokens": 1000, "n": 1},
        train={"batch_size": 8},
        timeouts={"stall_s": 40},
        **{"async": {"staleness_threshold": 0.5, "sync_steps": 2}},
    )


class World:
    """A wait for a step, while one of the stages computes tokens."""

    def __init__(self, least_s: float = 0, endless: bool = False) -> None:
        self.timer = ManualTimer()
        self.tokens = dict.fromkeys(("rollouter", "scorer", "trainer"), 0)
        stages: Any = SimpleNamespace(
            **{name: SimpleNamespace(progress=self.ask(name)) for name in self.tokens}
        )
        metering = Metering()
        metering.waits["train"] = "scored samples"
        self.lines: list[str] = []
        waits = Waits(self.lines.append, self.timer, lambda: self.timer.now)
        stall = StallDetector(config(), stages, metering, waits, timer=self.timer)
        self.step: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self.wait = asyncio.create_task(stall.within("a batch", self.step, least_s, endless))

    def ask(self, name: str) -> Any:
        async def progress() -> Progress:
            return Progress(self.tokens[name])

        return progress

    async def passes(
        self, looks: int, stage: str = "", every_s: float = 40 / PROBES_PER_TIMEOUT
    ) -> None:
        for _ in range(looks):
            if stage:
                self.tokens[stage] += 1
            for _ in range(30):
                await asyncio.sleep(0)
            self.timer.advance(every_s)
            for _ in range(30):
                await asyncio.sleep(0)


@pytest.mark.parametrize("stage", ["rollouter", "scorer", "trainer"])
async def test_tokens_of_any_stage_are_a_sign_of_life(stage: str) -> None:
    world = World()
    await world.passes(50, stage)
    assert not world.wait.done()
    world.step.set_result(1)
    assert await world.wait == 1


async def test_a_run_without_any_ends_and_says_what_the_pools_waited_for() -> None:
    world = World()
    await world.passes(2, "rollouter")
    await world.passes(PROBES_PER_TIMEOUT)
    with pytest.raises(StageTimeout) as caught:
        await asyncio.wait_for(world.wait, 5)
    assert "waited for a batch: no new token for 40 s" in caught.value.cause
    assert "train: scored samples" in caught.value.cause
    assert "timeouts.stall_s" in caught.value.remedy


async def test_a_timeout_of_the_work_itself_keeps_its_own_words() -> None:
    world = World()
    world.step.set_exception(StageTimeout("weight sync", "the snapshot took too long"))
    with pytest.raises(StageError, match="weight sync: the snapshot"):
        await asyncio.wait_for(world.wait, 5)


async def test_what_is_heard_of_only_as_a_whole_has_the_time_that_it_may_take() -> None:
    world = World(least_s=4000)
    await world.passes(PROBES_PER_TIMEOUT - 1, every_s=1000)
    assert not world.wait.done()
    await world.passes(1, every_s=1000)
    assert world.wait.done()


@pytest.mark.parametrize("endless", [False, True])
async def test_a_wait_has_a_line_every_ten_seconds_with_its_bound(endless: bool) -> None:
    world = World(endless=endless)
    await world.passes(2, "trainer", EVERY_S)
    assert world.lines == [
        f"waiting for a batch ({seconds} s so far, at most 40 s without a new token)"
        for seconds in (10, 20)
        if not endless
    ]
    world.wait.cancel()


def test_a_step_may_take_the_tokens_of_all_samples_under_way_and_an_evaluation_its_own() -> None:
    assert most_tokens(config(), evaluated=0) == 1.5 * 2 * 8 * 1100 * 3
    assert most_tokens(config(), evaluated=500) == 500 * 1100 * 3


def test_teachers_may_take_the_time_of_one_long_answer_however_few_they_are_asked_for() -> None:
    sampling: Any = SimpleNamespace(n=1, max_tokens=32_000)
    made = config()
    health = made.teachers["t"].health
    seconds = health.timeout_s + 32_000 / health.min_response_tokens_per_s
    assert teachers_s(made, [make_prompt("p")], sampling) == health.tries * seconds
