"""Orders to the trainer's other ranks, on made-up processes."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from async_opd.cluster.trainer_actor import RemoteRankGroup
from async_opd.core.errors import ProcessDied, StageError


class Process:
    """Answers with its arguments, or with an error."""

    def __init__(self, name: str, error: StageError | None = None) -> None:
        self.name = name
        self.error = error
        self.calls = 0

    async def call(self, method: str, *arguments: Any, timeout_s: float) -> Any:
        self.calls += 1
        if self.error is not None:
            raise self.error
        return (self.name, method, *arguments)


def rank_group(*processes: Process) -> RemoteRankGroup:
    followers: Any = processes
    return RemoteRankGroup(followers, grace_s=0.0 if len(processes) == 1 else 5.0)


async def results(made: RemoteRankGroup, *arguments: tuple[Any, ...]) -> list[Any]:
    def order() -> list[Any]:
        return made.dispatch("backward", arguments)()

    return await asyncio.to_thread(order)


async def test_each_rank_gets_its_own_arguments() -> None:
    made = rank_group(Process("trainer/1"), Process("trainer/2"))
    found = await results(made, ("a",), ("b",))
    assert found == [("trainer/1", "backward", "a"), ("trainer/2", "backward", "b")]


async def test_the_first_rank_counts() -> None:
    assert rank_group(Process("trainer/1"), Process("trainer/2")).ranks == 3


async def test_the_death_of_a_rank_is_the_trainers() -> None:
    made = rank_group(Process("trainer/1", ProcessDied("trainer/1", "its process died")))
    with pytest.raises(ProcessDied) as caught:
        await results(made, ())
    assert caught.value.stage == "trainer"
    assert "trainer/1: its process died" in caught.value.cause


async def test_a_failure_reaches_the_caller_that_waits_for_one() -> None:
    made = rank_group(Process("trainer/1", StageError("trainer/1", "out of memory")))
    waiting = asyncio.create_task(made.failure())
    with pytest.raises(StageError, match="out of memory"):
        await results(made, ())
    assert (await waiting).cause == "out of memory"


async def test_a_collective_that_broke_is_blamed_on_the_rank_that_died_a_moment_later() -> None:
    class DiesLater(Process):
        async def call(self, method: str, *arguments: Any, timeout_s: float) -> Any:
            await broken.wait()
            return await super().call(method, *arguments, timeout_s=timeout_s)

    broken = asyncio.Event()
    died = DiesLater("trainer/1", ProcessDied("trainer/1", "its process died"))
    made = rank_group(
        died, Process("trainer/2", StageError("trainer/2", "connection reset by peer"))
    )
    waiting = asyncio.create_task(made.failure())
    order = asyncio.create_task(results(made, (), ()))
    await asyncio.sleep(0)
    broken.set()
    assert isinstance(await waiting, ProcessDied)
    with pytest.raises(StageError):
        await order


async def test_arguments_that_cannot_be_sent_are_a_failure() -> None:
    class Refuses(Process):
        async def call(self, method: str, *arguments: Any, timeout_s: float) -> Any:
            raise TypeError("cannot pickle")

    made = rank_group(Refuses("trainer/1"))
    with pytest.raises(StageError, match="TypeError: cannot pickle"):
        await results(made, ())
    assert (await made.failure()).stage == "trainer/1"


async def test_after_a_failure_nobody_gets_orders() -> None:
    well = Process("trainer/2")
    made = rank_group(Process("trainer/1", StageError("trainer/1", "out of memory")), well)
    with pytest.raises(StageError):
        await results(made, (), ())
    calls = well.calls
    with pytest.raises(StageError, match="out of step"):
        await results(made, (), ())
    assert well.calls == calls


async def test_nor_after_the_first_rank_has_failed_itself() -> None:
    well = Process("trainer/1")
    made = rank_group(well)
    made.mark_broken()
    with pytest.raises(StageError, match="out of step"):
        await results(made, ())
    assert well.calls == 0
