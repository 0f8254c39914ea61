"""Work of several ranks: the failure of another rank is raised at once, and is the one raised."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from async_opd.core.errors import StageError
from trainer.follower import Follower
from trainer.rank_group import SINGLE_RANK, AllRanks, run_with_ranks

DEATH = StageError("trainer", "trainer/1 died")


class Others:
    """A group of two ranks, of which the second fails when the test sets ``failed``."""

    ranks = 2

    def __init__(self, fails: bool = False) -> None:
        self.failed = asyncio.Event()
        if fails:
            self.failed.set()

    def dispatch(self, method: str, arguments: Sequence[Any]) -> Callable[[], list[Any]]:
        raise NotImplementedError

    def mark_broken(self) -> None:
        raise NotImplementedError

    async def failure(self) -> StageError:
        await self.failed.wait()
        return DEATH


async def answer() -> int:
    return 42


async def hang() -> int:
    await asyncio.Event().wait()
    return 0


async def fail() -> int:
    raise RuntimeError("connection closed by peer")


async def test_one_rank_waits_for_no_other_and_one_that_is_well_changes_nothing() -> None:
    for others in (SINGLE_RANK, Others()):
        assert await run_with_ranks(others, answer()) == 42


async def test_work_that_is_done_counts_although_another_rank_fails() -> None:
    async def both() -> int:
        others.failed.set()
        return 42

    others = Others()
    assert await run_with_ranks(others, both()) == 42


async def test_a_failure_ends_the_wait_for_work_and_an_own_error_counts_alone() -> None:
    with pytest.raises(StageError, match="trainer/1 died"):
        await run_with_ranks(Others(fails=True), hang())
    with pytest.raises(RuntimeError, match="connection closed"):
        await run_with_ranks(Others(), fail(), grace_s=0)


async def test_a_broken_collective_is_blamed_on_the_rank_that_died() -> None:
    others = Others()

    async def breaks() -> int:
        asyncio.get_running_loop().call_soon(others.failed.set)
        return await fail()

    with pytest.raises(StageError, match="trainer/1 died"):
        await run_with_ranks(others, breaks())


class Asked(Others):
    """Notes what it is asked for, and answers for the second rank."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[tuple[str, Sequence[Any]]] = []
        self.broken = False

    def dispatch(self, method: str, arguments: Sequence[Any]) -> Callable[[], list[Any]]:
        self.asked.append((method, arguments))
        return lambda: ["second"]

    def mark_broken(self) -> None:
        self.broken = True


def test_a_method_of_a_part_is_asked_of_the_others_by_its_last_name() -> None:
    others = Asked()
    first: Any = SimpleNamespace(state=SimpleNamespace(load=lambda folder: f"first {folder}"))
    assert AllRanks(first, others).each("state.load", "here") == ["first here", "second"]
    assert others.asked == [("load", [("here",)])]


def test_an_error_beside_the_others_puts_them_out_of_step() -> None:
    others = Asked()
    with (
        pytest.raises(RuntimeError, match="out of memory"),
        AllRanks(None, others).beside("weights.join_gather", "sent"),
    ):
        raise RuntimeError("out of memory")
    assert (others.asked, others.broken) == ([("join_gather", [("sent",)])], True)


def test_a_follower_has_every_method_that_all_ranks_are_asked_for() -> None:
    trainer = Path(__file__).parents[2] / "trainer"
    calls = re.compile(r'\.(?:each|beside|compared)\(\s*"(?:\w+\.)*(\w+)"')
    names = {name for file in trainer.rglob("*.py") for name in calls.findall(file.read_text())}
    assert {"capture", "join_gather", "reference"} <= names
    assert {name for name in names if not hasattr(Follower, name)} == set()
