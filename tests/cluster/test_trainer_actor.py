"""Orders to the trainer's other ranks, on made-up processes."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from async_opd.cluster.trainer_actor import RemoteRankGroup
from async_opd.core.errors import ProcessDied, StageError


class Process:
    """Answers with its arguments, or with an error."""

    def __init__(self, name: str, error: Exception | None = None) -> None:
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
    assert made.ranks == 3  # the first rank counts


async def test_the_death_of_a_rank_is_the_trainers() -> None:
    made = rank_group(Process("trainer/1", ProcessDied("trainer/1", "its process died")))
    with pytest.raises(ProcessDied) as caught:
        await results(made, ())
    assert caught.value.stage == "trainer"
    assert "trainer/1: its process died" in caught.value.cause


@pytest.mark.parametrize(
    ("error", "cause"),
    [
        (StageError("trainer/1", "out of memory"), "out of memory"),
        (TypeError("cannot pickle"), "TypeError: cannot pickle"),
    ],
)
async def test_a_failure_of_a_rank_or_its_arguments_reaches_the_caller_that_waits_for_one(
    error: Exception, cause: str
) -> None:
    made = rank_group(Process("trainer/1", error))
    waiting = asyncio.create_task(made.failure())
    with pytest.raises(StageError, match=cause):
        await results(made, ())
    assert (await waiting).stage == "trainer/1"


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


@pytest.mark.parametrize("own", [False, True], ids=["of a rank", "of the first rank itself"])
async def test_after_a_failure_nobody_gets_orders(own: bool) -> None:
    well = Process("trainer/2")
    failing = Process("trainer/1", None if own else StageError("trainer/1", "out of memory"))
    made = rank_group(failing, well)
    if own:
        made.mark_broken()
    else:
        with pytest.raises(StageError):
            await results(made, (), ())
    calls = well.calls
    with pytest.raises(StageError, match="out of step"):
        await results(made, (), ())
    assert well.calls == calls
