"""Environments in separate processes: whatever one does costs its own episode only."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from hypothesis import given
from hypothesis import strategies as st

from async_opd.core.environments import AssistantMessage, Collateral
from async_opd.core.errors import RolloutFault, StageError
from async_opd.environments.pool import Environments, EnvironmentSpec, environment_fault
from async_opd.processes.user_process import UserProcess
from tests.processes.test_signals import is_gone
from tests.properties import examples
from tests.world.clock import ManualTimer, settle
from tests.world.config import run_config
from tests.world.environments import WORLD, FakeHost, FakeSpec, call, calls, row, spec_of

ROOT = Path(__file__).parents[2]
Pool = Callable[..., Environments]


@pytest.fixture
async def pool() -> AsyncIterator[Pool]:
    made: list[Environments] = []

    def build(notify: Callable[[str], None] = print, **section: Any) -> Environments:
        made.append(Environments(spec_of(**{"processes": 1, **section}), notify))
        return made[-1]

    yield build
    for one in made:
        one.close()


async def opened(environments: Environments, count: int = 1, **fields: Any) -> list[Any]:
    """Episodes that have begun."""
    episodes = [await environments.open() for _ in range(count)]
    for number, episode in enumerate(episodes):
        await episode.reset(row(f"0:{number}", **fields), number)
    return episodes


async def end_of(episode: Any, message: AssistantMessage) -> BaseException:
    """The error of a step."""
    with pytest.raises((RolloutFault, Collateral)) as found:
        await episode.step(message)
    return found.value


async def test_an_episode_begins_is_played_and_has_a_reward(pool: Pool, tmp_path: Path) -> None:
    record = tmp_path / "record"
    environments = pool(kwargs={"tell": str(record)})
    (episode,) = await opened(environments, opening=" Add up.")
    outcome = await episode.step(call("add", number=3))
    assert [one["content"] for one in outcome.messages] == ["3"]
    assert outcome.tool_s > 0
    assert (await episode.step(AssistantMessage("done"))).done
    assert await episode.reward() == 3.0
    await episode.close()
    await episode.close()
    assert record.read_text() == "closed\n"


@pytest.mark.slow
async def test_an_episode_waits_for_room(pool: Pool) -> None:
    environments = pool(concurrency=1)
    (episode,) = await opened(environments)
    waits = asyncio.create_task(environments.open())
    await settle()
    assert not waits.done()
    await episode.close()
    await (await waits).close()


@pytest_asyncio.fixture(scope="class", loop_scope="class")
async def shared() -> AsyncIterator[Environments]:
    """One process for the tests of a class."""
    environments = Environments(spec_of(processes=1), print)
    yield environments
    environments.close()


@pytest.mark.asyncio(loop_scope="class")
class TestAnEpisode:
    async def test_has_its_own_state_beside_others_of_the_process(
        self, shared: Environments
    ) -> None:
        episodes = await opened(shared, 3)
        for number, episode in enumerate(episodes):
            await episode.step(call("add", number=number))
        assert [await episode.reward() for episode in episodes] == [0.0, 1.0, 2.0]

    async def test_does_not_wait_for_others_of_the_process(self, shared: Environments) -> None:
        slow, quick = await opened(shared, 2)
        waits = asyncio.create_task(slow.step(call("do", what="wait for another")))
        await settle()
        await quick.step(call("do", what="go on"))
        assert [one["content"] for one in (await waits).messages] == ["done"]

    async def test_may_have_large_answers_which_are_cut(self, shared: Environments) -> None:
        (episode,) = await opened(shared)
        outcome = await episode.step(calls(("large", {"lines": 10**6}), ("add", {"number": 1})))
        large, small = [one["content"] for one in outcome.messages]
        assert large.startswith("a line?\n")
        assert (len(large), small) == (1 << 19, "1")

    async def test_answers_names_that_no_text_has(self, shared: Environments) -> None:
        (episode,) = await opened(shared)
        outcome = await episode.step(call("\ud800"))
        assert (outcome.unknown, outcome.messages[0]["name"]) == (1, "?")

    async def test_that_was_never_begun_is_closed(self, shared: Environments) -> None:
        before = shared.episodes
        await (await shared.open()).close()
        assert shared.episodes == before + 1


@pytest.mark.slow
class TestAFault:
    @pytest.mark.parametrize(
        ("message", "found"),
        [("hang", "step took longer than 4 s"), ("exit", "exit code 3"), ("die", "signal 11")],
    )
    async def test_is_of_the_episode_alone_and_its_neighbours_begin_again(
        self, pool: Pool, message: str, found: str
    ) -> None:
        environments = pool(timeouts={"step_s": 4 if message == "hang" else 60})
        bad, good, other = await opened(environments, 3)
        fault = await end_of(bad, call("do", what=message))
        assert isinstance(fault, RolloutFault)
        assert (fault.stage, bool(fault.remedy)) == ("environment", True)
        assert found in fault.cause
        assert "row 0:0" in fault.cause
        assert isinstance(await end_of(good, call("add", number=1)), Collateral)
        assert isinstance(await end_of(good, call("add", number=1)), Collateral)
        assert environments.collateral == 1
        for episode in (bad, good, other):
            await episode.close()
        (again,) = await opened(environments)
        assert (await again.step(call("add", number=1))).messages[0]["content"] == "1"
        assert (environments.episodes, environments.collateral) == (4, 1)

    async def test_of_a_hanging_step_reaches_a_neighbour_in_the_middle_of_a_call(
        self, pool: Pool
    ) -> None:
        """The neighbour's call hangs too, but has a minute."""
        environments = pool(timeouts={"step_s": 0.7, "reset_s": 60})
        (bad,) = await opened(environments)
        good = await environments.open()
        begins = asyncio.create_task(good.reset(row("0:1", then="hang"), 1))
        await settle()
        with pytest.raises(RolloutFault, match=r"timeouts\.step_s"):
            await bad.step(call("do", what="hang"))
        with pytest.raises(Collateral):
            await begins

    async def test_of_a_reset_that_hangs_names_its_bound(self, pool: Pool) -> None:
        with pytest.raises(RolloutFault, match=r"reset took longer than 0\.5 s.*reset_s"):
            await opened(pool(timeouts={"reset_s": 0.5}), then="hang")

    async def test_of_an_episode_whose_time_is_over_in_a_call(self) -> None:
        timer = ManualTimer()
        spec = spec_of(processes=1, timeouts={"step_s": 3600})
        environments = Environments(spec, print, timer, timer.clock)
        try:
            (episode,) = await opened(environments)
            waits = asyncio.create_task(episode.step(call("do", what="hang")))
            await settle()
            timer.advance(1800)
            with pytest.raises(RolloutFault, match=r"step took longer than 1800 s.*episode_s"):
                await asyncio.wait_for(waits, 60)
        finally:
            environments.close()

    async def test_of_an_episode_whose_time_is_over_between_calls_ends_no_process(self) -> None:
        timer = ManualTimer()
        environments = Environments(spec_of(processes=1), print, timer, timer.clock)
        late, other = await opened(environments, 2)
        timer.advance(1800)
        with pytest.raises(RolloutFault, match=r"the episode took longer than 1800 s"):
            await late.step(call("add", number=1))
        await other.reset(row(), 0)
        await other.step(call("add", number=1))
        assert (await late.reward(), await other.reward()) == (0.0, 1.0)
        environments.close()

    async def test_of_code_that_stops_the_whole_process_is_of_the_only_one_at_work(
        self, pool: Pool, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("async_opd.environments.pool.PING_S", 1.0)
        environments = pool(timeouts={"step_s": 0.5})
        bad, good = await opened(environments, 2)
        assert isinstance(await end_of(bad, call("do", what="lock")), RolloutFault)
        assert isinstance(await end_of(good, call("add", number=1)), Collateral)

    async def test_that_several_may_have_is_of_the_one_that_is_there_each_time(
        self, pool: Pool
    ) -> None:
        environments = pool()
        ends: list[list[str]] = []
        for number in range(3):
            bad, good = await environments.open(), await environments.open()
            await asyncio.gather(bad.reset(row("0:1"), 0), good.reset(row(f"1:{number}"), 0))
            waits = asyncio.create_task(end_of(good, call("do", what="hang")))
            await settle()
            found = [await end_of(bad, call("do", what="exit")), await waits]
            ends.append([type(one).__name__ for one in found])
            await bad.close()
            await good.close()
        assert ends == [["Collateral"] * 2, ["Collateral"] * 2, ["RolloutFault", "Collateral"]]

    async def test_that_several_may_have_counts_a_row_once_until_an_episode_of_it_ends_well(
        self, pool: Pool
    ) -> None:
        environments = pool()

        async def crash(number: int) -> set[str]:
            opens = [await environments.open() for _ in range(4)]
            begins = [one.reset(row("0:1"), 0) for one in opens[1:]]
            await asyncio.gather(opens[0].reset(row(f"1:{number}"), 0), *begins)
            waits = [asyncio.create_task(end_of(one, call("do", what="hang"))) for one in opens[1:]]
            await settle()
            await end_of(opens[0], call("do", what="exit"))
            ends = {type(await one).__name__ for one in waits}
            for one in opens:
                await one.close()
            return ends

        assert [await crash(number) for number in range(2)] == [{"Collateral"}] * 2
        (well,) = [await environments.open()]
        await well.reset(row("0:1"), 0)
        await well.reward()
        await well.close()
        assert [await crash(number) for number in (2, 3)] == [{"Collateral"}] * 2
        assert await crash(4) == {"RolloutFault"}

    async def test_of_a_process_that_dies_between_calls_is_of_its_episodes_after_three_times(
        self, pool: Pool
    ) -> None:
        environments, ends = pool(), list[str]()
        for _ in range(3):
            (episode,) = await opened(environments)
            pid = int((await episode.step(call("pid"))).messages[0]["content"])
            os.kill(pid, signal.SIGKILL)
            await asyncio.to_thread(os.waitid, os.P_PID, pid, os.WEXITED | os.WNOWAIT)
            ends.append(type(await end_of(episode, call("pid"))).__name__)
            await episode.close()
        assert ends == ["Collateral", "Collateral", "RolloutFault"]

    async def test_of_memory_names_its_bound_and_ends_no_process(self, pool: Pool) -> None:
        bad, good = await opened(pool(memory_gb=2), 2)
        with pytest.raises(RolloutFault, match=r"needed more memory than environment\.memory_gb"):
            await bad.step(call("do", what="memory"))
        await good.step(call("add", number=1))
        assert await good.reward() == 1.0

    async def test_of_a_reset_that_raises_names_the_row(self, pool: Pool) -> None:
        with pytest.raises(RolloutFault, match="row 0:0: reset failed: ValueError: no such square"):
            await opened(pool(), then="raise")

    @pytest.mark.parametrize(
        ("then", "found"), [("interrupt", "KeyboardInterrupt"), ("half", r"no such \?")]
    )
    async def test_of_a_reset_that_raises_anything_ends_no_process(
        self, pool: Pool, then: str, found: str
    ) -> None:
        environments = pool()
        bad, good = await environments.open(), await environments.open()
        with pytest.raises(RolloutFault, match=found):
            await bad.reset(row(then=then), 0)
        await good.reset(row(), 0)
        assert await good.reward() == 0.0

    async def test_of_a_close_that_hangs_is_a_warning(self, pool: Pool) -> None:
        said: list[str] = []
        hangs = f"{WORLD}:HangsAtClose"
        environments = pool(said.append, factory=hangs, timeouts={"close_s": 0.5}, concurrency=2)
        bad, good = await opened(environments, 2)
        await bad.close()
        assert "close took longer than 0.5 s" in said[0]
        assert isinstance(await end_of(good, call("add", number=1)), Collateral)
        await good.close()
        assert len(said) == 1
        assert len(await opened(environments, 2)) == 2  # there is room again

    async def test_of_the_code_is_the_pools(self, pool: Pool) -> None:
        environments = pool(factory=f"{WORLD}:WithoutTools", concurrency=1)
        for _ in range(2):
            with pytest.raises(StageError, match="has no tools"):
                await environments.open()
        assert environments.episodes == 0


@pytest.mark.slow
class TestTheEnd:
    async def test_of_a_wait_leaves_no_environment(self, pool: Pool, tmp_path: Path) -> None:
        record = tmp_path / "record"
        environments = pool(concurrency=1, kwargs={"tell": str(record)})
        (episode,) = await opened(environments)
        step = asyncio.create_task(episode.step(call("do", what="wait")))
        await settle()
        step.cancel()
        closing = asyncio.create_task(episode.close())
        await settle()
        closing.cancel()
        await (await environments.open()).close()  # room comes when it is closed
        assert record.read_text() == "closed\n"
        assert environments.collateral == 0

    async def test_of_the_pool_ends_all_episodes(self, pool: Pool) -> None:
        environments = pool(processes=2)
        episodes = await opened(environments, 2)
        pids = [int((await one.step(call("pid"))).messages[0]["content"]) for one in episodes]
        assert len(set(pids)) == 2
        hangs = asyncio.create_task(episodes[0].step(call("do", what="hang")))
        await settle()
        environments.close()
        with pytest.raises(StageError, match="its pool was closed"):
            await hangs
        with pytest.raises(StageError, match="its pool was closed"):
            await environments.open()
        assert all(map(is_gone, pids))

    async def test_of_the_pool_while_a_process_starts_ends_the_wait(self, pool: Pool) -> None:
        environments = pool()
        waits = asyncio.create_task(environments.open())
        await settle(3)
        environments.close()
        with pytest.raises(StageError, match="its pool was closed"):
            await waits

    def test_of_a_killed_parent_is_that_of_its_processes(self, tmp_path: Path) -> None:
        program = """
import asyncio
from async_opd.environments.pool import Environments
from tests.world.environments import call, row, spec_of

async def main():
    episode = await Environments(spec_of()).open()
    await episode.reset(row(), 0)
    print((await episode.step(call("pid"))).messages[0]["content"], flush=True)
    await episode.step(call("do", what="hang"))

asyncio.run(main())
"""
        env = {**os.environ, "PYTHONPATH": str(ROOT)}
        command = [sys.executable, "-c", program]
        parent = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=env)
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        os.kill(parent.pid, signal.SIGKILL)
        parent.wait(30)
        assert is_gone(child)


@pytest.mark.slow
async def test_processes_inherit_no_secrets_but_those_that_are_given(
    pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("SEARCH_KEY", "HF_TOKEN"):
        monkeypatch.setenv(name, "correct horse battery")
    (episode,) = await opened(pool(pass_env=["SEARCH_KEY"]))
    named = ("SEARCH_KEY", "HF_TOKEN")
    outcome = await episode.step(calls(*(("variable", {"name": name}) for name in named)))
    found = [one["content"] for one in outcome.messages]
    assert found == ["correct horse battery", "not set"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("factory", "fields", "found"),
    [
        ("Counter", {}, None),
        ("Counter", {"then": "hang"}, "reset took longer than 2 s"),
        ("Counter", {"then": "exit"}, "its process died (exit code 3)"),
        ("NeedsField", {}, "board"),
        ("WithoutReset", {}, "has no method reset"),
    ],
)
async def test_the_first_row_shows_whether_an_episode_can_begin(
    factory: str, fields: dict[str, str], found: str | None
) -> None:
    spec = spec_of(
        factory=f"{WORLD}:{factory}",
        timeouts={"reset_s": 2 if fields.get("then") == "hang" else 60},
    )
    fault = await environment_fault(spec, row(**fields))
    assert (fault is None) == (found is None)
    if fault is not None:
        assert str(found) in fault.cause
        assert fault.remedy


def test_a_runs_config_gives_the_bounds() -> None:
    config = run_config(environment={"kind": "class", "factory": "m:C"})
    spec = EnvironmentSpec.of(config)
    assert (spec.config.timeouts.step_s, spec.config.concurrency, spec.name) == (60, 64, "m:C")


class FailsOnce(FakeSpec):
    """Its second process does not load."""

    async def started(self) -> UserProcess:
        process = await super().started()
        if len(self.hosts) == 2:
            raise StageError("environment", "it took too long")
        return process


async def test_a_process_that_does_not_load_after_others_did_is_started_once_more() -> None:
    spec = FailsOnce(spec_of(processes=2).config, 60)
    environments = Environments(spec)
    for _ in range(2):
        await environments.open()
    assert (len(spec.hosts), environments.episodes) == (3, 2)
    environments.close()


@examples(300)
@given(seed=st.integers(0, 2**32))
def test_every_environment_that_begins_ends_once_and_makes_room(seed: int) -> None:
    asyncio.run(_accounted(random.Random(seed)))


async def _accounted(chance: random.Random) -> None:
    timer, hosts = ManualTimer(), list[FakeHost]()
    processes, concurrency = chance.randint(1, 3), chance.randint(1, 6)
    section = spec_of(processes=processes, concurrency=concurrency).config
    spec = FakeSpec(section, 60, chance=chance, hosts=hosts)
    environments = Environments(spec, lambda text: None, timer, timer.clock)
    ends: list[str] = []

    async def play(count: int) -> None:
        episode = await environments.open()
        try:
            await episode.reset(row(), 0)
            for _ in range(count):
                await episode.step(AssistantMessage(""))
            await episode.reward()
            ends.append("done")
        except (RolloutFault, Collateral) as error:
            ends.append(type(error).__name__)
        finally:
            await episode.close()

    tasks = [asyncio.create_task(play(chance.randint(0, 4))) for _ in range(chance.randint(1, 12))]
    await settle(chance.randint(0, 40))
    for task in chance.sample(tasks, chance.randint(0, len(tasks) // 3)):
        task.cancel()
    for _ in range(1000):
        if all(task.done() for task in tasks):
            break
        await timer.passes(5)
    assert all(task.done() for task in tasks)
    await timer.passes(100)
    room = [await environments.open() for _ in range(concurrency)]  # all of it is free
    for one in room:
        await one.close()
    assert ends.count("Collateral") == environments.collateral
    assert len([host for host in hosts if host.alive]) <= processes
    for host in hosts:
        assert sorted(host.began) == sorted(host.ended)
        assert len(set(host.began)) == len(host.began)
    environments.close()
