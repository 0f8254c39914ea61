"""A node that does not answer is lost by the verdict of a head whose answers are made up."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import replace

import pytest

from async_opd.cluster.placement.nodes import ANSWER_S, VERDICT_S, Node, lost_node
from async_opd.core.errors import StageError
from async_opd.waiting.deadline import Deadline
from tests.world.clock import ManualTimer, settle

C = Node("machine-c (10.0.0.3)", "10.0.0.3", 1, True)
LOST_C = replace(C, alive=False, why="health check failed")


class Silence:
    """Answers of the head about node c in turn, and whether that node answers itself.

    None means that it does not answer.
    """

    def __init__(self, *nodes: Node | None, answers: bool = False) -> None:
        self.timer = ManualTimer()
        self.found = list(nodes)
        self.reachable = answers

    async def ask(self) -> Mapping[str, Node]:
        found = self.found.pop(0) if len(self.found) > 1 else self.found[0]
        if found is None:
            raise StageError("cluster", "Ray's head does not answer: refused")
        return {"c": found}

    async def answers(self, node: Node) -> bool:
        if not self.reachable:
            await Deadline("c", self.timer).pause(ANSWER_S)
        return self.reachable

    async def lost(self) -> Node | None:
        asked = asyncio.create_task(lost_node("c", self.ask, self.answers, self.timer))
        while not asked.done():
            assert self.timer.now <= VERDICT_S
            await settle(9)
            self.timer.advance(1)
        return await asked


@pytest.mark.parametrize("before", [[C, C, C], [None, None]], ids=["alive", "silent"])
async def test_a_silent_node_is_lost_by_the_verdict_of_the_head_which_is_waited_for(
    before: list[Node | None],
) -> None:
    assert await Silence(*before, LOST_C).lost() == LOST_C


async def test_a_node_that_answers_is_not_lost_and_no_verdict_is_waited_for() -> None:
    world = Silence(C, answers=True)
    assert await lost_node("c", world.ask, world.answers, world.timer) is None
    assert world.timer.due == []


@pytest.mark.parametrize("answer", [C, None])
async def test_the_wait_for_a_verdict_has_an_end(answer: Node | None) -> None:
    world = Silence(answer)
    assert await world.lost() is None
    assert world.timer.due == []
