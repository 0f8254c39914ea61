"""The head and the nodes of a cluster are lost and come back, on answers that are made up."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from async_opd.cluster.placement.nodes import ANSWER_S, Node
from async_opd.cluster.watching import HEAD_S, RECONNECT, WATCH_S, ClusterWatch, left_s
from async_opd.core.errors import HeadLost, StageError
from tests.world.clock import ManualTimer, settle

B = Node("machine-b (10.0.0.2)", "10.0.0.2", 1, True)
C = Node("machine-c (10.0.0.3)", "10.0.0.3", 1, True)
LOST_C = replace(C, alive=False, why="health check failed")

DRAINING_C = replace(C, draining=True)


class World:
    """A cluster of the nodes b and c whose head answers or not; time passes when a test says so."""

    def __init__(self, placement: Any = None) -> None:
        self.timer = ManualTimer()
        self.nodes: Mapping[str, Node] = {"b": B, "c": C}
        self.silent = False
        self.lines: list[str] = []
        self.watch = ClusterWatch(
            self.lines.append, placement, self.ask, self.timer, self.timer.clock
        )

    async def ask(self) -> Mapping[str, Node]:
        if self.silent:
            raise StageError("cluster", "Ray's head does not answer: refused")
        return self.nodes

    async def look(self, **nodes: Node) -> None:
        self.nodes = nodes or self.nodes
        await self.watch.look()


NODE_C = "cluster: machine-c (10.0.0.3)"


@pytest.mark.parametrize(
    ("looks", "line"),
    [
        ([{}, {}, *[{"b": B, "c": LOST_C}] * 2], f"{NODE_C} is lost: health check failed"),
        ([{}, {"b": B}], f"{NODE_C} is lost"),
        ([{"b": B}, {"b": B, "d": C}, {}], f"{NODE_C} has joined"),
        (
            [{}, *[{"b": B, "c": DRAINING_C}] * 2],
            f"{NODE_C} drains: its replicas leave it; those that share GPUs stay until it is lost",
        ),
    ],
    ids=["lost", "forgotten by Ray", "joined", "drains"],
)
async def test_a_node_that_is_lost_joins_or_drains_is_one_line_and_those_at_the_start_none(
    looks: list[dict[str, Node]], line: str
) -> None:
    world = World()
    for nodes in looks:
        await world.look(**nodes)
    assert world.lines == [line]


async def test_a_silent_head_is_one_line_at_once_and_the_end_of_the_run_after_a_bound() -> None:
    world = World()
    watching = asyncio.create_task(world.watch.run())
    await asyncio.sleep(0)
    world.silent = True
    while world.timer.now < HEAD_S:
        assert not watching.done()
        world.timer.advance(WATCH_S)
        await settle(3)
    world.timer.advance(WATCH_S)
    with pytest.raises(HeadLost, match=r"not answered for 20 s: .*refused(?s:.*)--resume"):
        await watching
    assert len(world.lines) == 1
    assert world.lines[0].startswith("cluster: Ray's head does not answer: refused")


async def test_a_head_that_answers_again_ends_nothing() -> None:
    world = World()
    for _ in range(3):
        world.silent = True
        await world.look()
        world.timer.advance(HEAD_S - 1)
        world.silent = False
        await world.look()
    assert world.lines[-1] == "cluster: Ray's head answers again"


class Hanging:
    """Asks the head who waits for GPUs, and gets no answer."""

    async def look(self, changed: bool) -> None:
        await asyncio.Event().wait()

    def close(self) -> None: ...


async def test_a_head_that_is_lost_while_it_is_asked_about_gpus_is_silent() -> None:
    world = World(Hanging())
    looking = asyncio.create_task(world.look())
    await settle(2)
    world.timer.advance(2 * ANSWER_S)
    await looking
    assert world.lines[0].startswith("cluster: the head's answer about GPUs took longer than 10 s")


@pytest.mark.parametrize(
    ("given", "left"), [({}, 20), ({RECONNECT: "300"}, 260), ({RECONNECT: "30"}, 0)]
)
def test_the_last_checkpoint_has_the_time_that_ray_leaves(
    given: dict[str, str], left: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(RECONNECT, raising=False)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    assert left_s() == left
