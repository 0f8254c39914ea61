"""Waits that last as long as responses: signs of life, on a timer that is moved by hand."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from async_opd.core.errors import StageError, StageTimeout
from async_opd.waiting.liveness import (
    MAX_RECOMPUTED,
    PROBES_PER_TIMEOUT,
    CombinedProgress,
    Progress,
    ProgressWatchdog,
    answer_s,
)
from tests.world.clock import ManualTimer, settle

QUIET_S = 40.0
LOOK_S = QUIET_S / PROBES_PER_TIMEOUT


class Wait:
    """A wait for work that ends when it is told; ``tokens`` are the engine's."""

    def __init__(self, most: int = 100_000) -> None:
        self.timer = ManualTimer()
        self.tokens, self.most = 0, most
        self.answers = True
        self.work: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        watchdog = ProgressWatchdog("student/0", QUIET_S, "sync.timeout_s", self.timer)
        self.task = asyncio.create_task(watchdog.within("finishing", self.work, self.ask))

    async def ask(self) -> Progress:
        if not self.answers:
            await asyncio.Event().wait()
        return Progress(self.tokens, self.most)

    async def passes(self, looks: int = 1, tokens: int = 0) -> None:
        """Looks are had, with so many new tokens before each."""
        for _ in range(looks):
            self.tokens += tokens
            await settle(12)
            self.timer.advance(LOOK_S)
            await settle(12)


@pytest.fixture
async def wait() -> AsyncIterator[Wait]:
    made = Wait()
    yield made
    made.task.cancel()


async def test_it_lasts_as_long_as_tokens_come(wait: Wait) -> None:
    await wait.passes(looks=500, tokens=100)
    assert not wait.task.done()
    wait.work.set_result("paused")
    assert await wait.task == "paused"


async def test_it_ends_when_none_came_for_the_bound_and_names_it(wait: Wait) -> None:
    await wait.passes(looks=10, tokens=100)
    await wait.passes(looks=PROBES_PER_TIMEOUT)
    with pytest.raises(StageTimeout) as caught:
        await asyncio.wait_for(wait.task, 5)
    assert "finishing: no new token for 40 s; 900 tokens came before" in caught.value.cause
    assert "raise sync.timeout_s" in caught.value.remedy


async def test_tokens_beyond_what_can_come_are_no_sign_of_life() -> None:
    wait = Wait(most=100)
    await wait.passes(looks=1 + MAX_RECOMPUTED + PROBES_PER_TIMEOUT, tokens=100)
    with pytest.raises(StageTimeout, match="of at most 100"):
        await asyncio.wait_for(wait.task, 5)


async def test_an_error_of_the_work_is_raised_as_it_is(wait: Wait) -> None:
    wait.work.set_exception(StageError("student/0", "its process died"))
    with pytest.raises(StageError, match="its process died"):
        await asyncio.wait_for(wait.task, 5)


@given(looks=st.lists(st.booleans(), max_size=40))
def test_it_ends_at_the_first_silence_of_the_bound_and_no_other(looks: list[bool]) -> None:
    async def body() -> None:
        wait = Wait()
        await wait.passes(tokens=1)  # whoever is asked first is only compared with
        silent = 1
        for alive in looks:
            await wait.passes(tokens=int(alive))
            silent = 0 if alive else silent + 1
            assert wait.task.done() == (silent >= PROBES_PER_TIMEOUT)
            if wait.task.done():
                assert isinstance(wait.task.exception(), StageTimeout)
                return
        wait.task.cancel()

    asyncio.run(body())


async def test_of_several_one_that_is_restarted_begins_anew_and_one_that_fails_stays() -> None:
    tokens: dict[str, int | StageError] = {"a": 10, "b": 5}

    def ask_of(name: str) -> Any:
        async def ask() -> Progress:
            found = tokens[name]
            if isinstance(found, StageError):
                raise found
            return Progress(found, 1)

        return ask

    several = CombinedProgress({name: ask_of(name) for name in tokens})
    assert await several() == Progress(15, 2)
    tokens |= {"a": 3, "b": StageError("b", "its process died")}
    assert await several() == Progress(18, 1)
    tokens |= {"a": 4, "b": 6}
    assert await several() == Progress(20, 2)


class Asked:
    """Who is asked, and answers when it is told to."""

    def __init__(self) -> None:
        self.questions: list[asyncio.Future[Progress]] = []

    async def __call__(self) -> Progress:
        self.questions.append(asyncio.get_running_loop().create_future())
        return await self.questions[-1]


async def test_an_answer_that_comes_after_that_to_a_later_question_is_no_restart() -> None:
    asked = Asked()
    several = CombinedProgress({"trainer": asked})
    first, second = asyncio.ensure_future(several()), asyncio.ensure_future(several())
    await settle(12)
    asked.questions[1].set_result(Progress(1_000_010))
    assert (await second).tokens == 1_000_010
    asked.questions[0].set_result(Progress(1_000_000))
    assert (await first).tokens == 1_000_010


async def test_one_that_does_not_answer_silences_none_beside_it_however_they_are_nested() -> None:
    """A replica's loop is held up: the others' tokens are a sign of life of the whole run."""
    timer, quiet_s = ManualTimer(), 8.0
    tokens = 0

    async def works() -> Progress:
        nonlocal tokens
        tokens += 1000
        return Progress(tokens)

    students = CombinedProgress(
        {"student/0": works, "student/1": Asked()}, answer_s(quiet_s, 2), timer
    )
    run = CombinedProgress({"rollouter": students, "scorer": Asked()}, answer_s(quiet_s), timer)
    watchdog = ProgressWatchdog("pipeline", quiet_s, "timeouts.stall_s", timer)
    work: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    wait = asyncio.ensure_future(watchdog.within("waited", work, run, 10**9))
    for _ in range(400):
        await settle(12)
        timer.advance(0.25)
    assert tokens > 10_000
    assert not wait.done()
    wait.cancel()


@pytest.mark.parametrize("quiet_s", [0.1, 20, 600, 36_000])
def test_several_answer_before_whoever_asks_them_gives_up(quiet_s: float) -> None:
    assert answer_s(quiet_s, 2) < answer_s(quiet_s) < quiet_s / PROBES_PER_TIMEOUT


async def test_who_did_not_answer_is_named_with_the_reason() -> None:
    timer = ManualTimer()

    async def dead() -> Progress:
        raise StageError("student/0", "its process died")

    students = CombinedProgress({"student/0": dead}, answer_s(QUIET_S, 2), timer)
    run = CombinedProgress({"rollouter": students, "scorer": Asked()}, answer_s(QUIET_S), timer)
    watchdog = ProgressWatchdog("pipeline", QUIET_S, "timeouts.stall_s", timer)
    work: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    wait = asyncio.ensure_future(watchdog.within("waited", work, run))
    for _ in range(100):
        await settle(12)
        timer.advance(1)
    with pytest.raises(StageTimeout) as caught:
        await asyncio.wait_for(wait, 5)
    assert "probe from student/0: its process died; scorer: a progress report" in caught.value.cause


async def test_one_that_never_answers_is_named_with_the_reason(wait: Wait) -> None:
    wait.answers = False
    await wait.passes(looks=2 * PROBES_PER_TIMEOUT)
    with pytest.raises(StageTimeout, match="probe from student/0: a progress report took longer"):
        await asyncio.wait_for(wait.task, 5)
