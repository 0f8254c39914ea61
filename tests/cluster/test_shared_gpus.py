"""A guest asks which GPUs its host has: the host's process, or a task, both made up."""

from __future__ import annotations

import asyncio
import itertools
import threading
from types import SimpleNamespace
from typing import Any

import pytest
import ray

from async_opd.cluster import remote
from async_opd.cluster.actor_shell import ActorPlacement
from async_opd.cluster.remote import Remote
from async_opd.core.errors import StageError, StageTimeout
from tests.world.processes import FakeHandle

HOST, TASK = ActorPlacement("a", ("0",)), ActorPlacement("b", ("1",))
UNREACHABLE = ray.exceptions.ActorUnavailableError("no connection", None)


class Cluster:
    """Ray as ``place_of`` asks it; ``answers`` are those to its questions for the actor, in turn.

    The last one is given again. A task has GPUs once it is ``free``.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *answers: Any) -> None:
        self.answers = [*answers]
        self.silent, self.asked, self.cancelled = 0, 0, 0
        self.lines: list[str] = []
        self.loop = threading.current_thread()
        self.task: asyncio.Future[ActorPlacement] = asyncio.get_running_loop().create_future()
        options = SimpleNamespace(remote=lambda: self.task)
        made = SimpleNamespace(options=lambda **named: options)
        monkeypatch.setattr(ray, "remote", lambda work: made)
        monkeypatch.setattr(ray, "get_actor", self.get_actor)
        monkeypatch.setattr(ray, "cancel", self.cancel)
        monkeypatch.setattr(remote, "nodes", self.nodes)
        monkeypatch.setattr(remote, "POLL_S", 0.001)
        monkeypatch.setattr(remote, "monotonic", itertools.count().__next__)

    def get_actor(self, name: str) -> Any:
        assert name == "run/rollouter/replica/0"
        assert threading.current_thread() is not self.loop  # a lost head does not answer
        self.asked += 1
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(answer, ValueError):
            raise answer
        if isinstance(answer, FakeHandle):
            return answer

        async def place() -> ActorPlacement:
            raise answer

        return SimpleNamespace(place=SimpleNamespace(remote=place))

    def cancel(self, task: Any) -> None:
        self.cancelled += 1

    async def nodes(self) -> dict[str, Any]:
        if self.silent:
            self.silent -= 1
            raise StageError("cluster", "Ray's head does not answer")
        return {}

    async def place(self, timeout_s: float = 5) -> ActorPlacement:
        given = ("student/0", "run/rollouter/replica/0", None, 1, timeout_s)
        asking = Remote.place_of(*given, self.lines.append)
        return await asyncio.wait_for(asking, 10)


MOVED = ray.exceptions.ActorPlacementGroupRemoved()
FLICKER = ray.exceptions.RpcError("connection reset")
NONE = ValueError("no actor of this name")


async def test_a_host_that_lives_is_asked_and_no_task(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = Cluster(monkeypatch, FakeHandle("a", "0"))
    monkeypatch.setattr(ray, "remote", None)
    assert await cluster.place() == HOST


@pytest.mark.parametrize(
    "first",
    [UNREACHABLE, FLICKER, NONE, MOVED],
    ids=["cut off", "network", "created meanwhile", "without a place"],
)
async def test_a_host_that_answers_later_is_found_while_a_task_waits_for_its_gpus(
    first: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = Cluster(monkeypatch, first, first, FakeHandle("a", "0"))
    assert await cluster.place() == HOST
    assert cluster.cancelled == 1  # it would take GPUs that the host needs


@pytest.mark.parametrize(
    "error",
    [
        ray.exceptions.RaySystemError("no such function"),
        ray.exceptions.RayTaskError("place", "", RuntimeError("no such function")),
    ],
    ids=["of Ray", "of its process"],
)
async def test_an_error_of_the_host_that_does_not_mean_its_absence_ends_the_wait(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = Cluster(monkeypatch, NONE, error)
    with pytest.raises(StageError, match=r"student/0: .* no such function") as found:
        await cluster.place()
    assert found.value.__cause__ is error
    assert cluster.cancelled == 1


async def test_without_a_host_a_task_gets_its_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = Cluster(monkeypatch, NONE)
    cluster.task.set_result(TASK)
    assert await cluster.place() == TASK
    assert cluster.cancelled == 0


async def test_a_head_that_is_silent_is_not_asked_for_the_host(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cluster = Cluster(monkeypatch, FakeHandle("a", "0"))
    cluster.silent = 3
    assert await cluster.place() == HOST
    assert cluster.asked == 1


@pytest.mark.slow
async def test_the_wait_for_gpus_has_a_bound_and_names_the_process(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cluster = Cluster(monkeypatch, NONE)
    words = r"^student/0: waiting for its GPUs took longer than 1 s"
    with pytest.raises(StageTimeout, match=words):
        await cluster.place(1)
    assert cluster.cancelled == 1


@pytest.mark.parametrize(
    ("answers", "lines"),
    [
        ([FLICKER] * 9, 1),
        ([FLICKER] * 3 + [UNREACHABLE] + [FLICKER] * 3, 1),
        ([FLICKER] * 3, 0),
        ([UNREACHABLE] * 9, 0),
    ],
    ids=["for long", "with other answers", "for a short time", "a host that is only dead"],
)
async def test_a_network_to_the_host_that_fails_for_long_is_one_line(
    answers: list[Exception], lines: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = Cluster(monkeypatch, *answers, FakeHandle("a", "0"))
    assert await cluster.place() == HOST
    words = (
        "student/0: the network between its machine and this one failed during starting: "
        "connection reset; it fails for 5 s, and is asked again for at most 5 s in all; "
    )
    assert [line.startswith(words) for line in cluster.lines] == [True] * lines


async def test_a_network_that_failed_long_ago_is_not_the_cause_of_a_wait(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cluster = Cluster(monkeypatch, FLICKER, *[NONE] * 9, FLICKER, NONE)
    with pytest.raises(StageTimeout) as found:
        await cluster.place(0.5)
    assert cluster.lines == []
    assert "connection reset" not in str(found.value)


async def test_the_error_of_a_network_that_fails_to_the_end_of_the_wait_has_its_cause(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cluster = Cluster(monkeypatch, FLICKER)
    with pytest.raises(StageTimeout, match=r"longer than 0\.5 s: .*connection reset") as found:
        await cluster.place(0.5)
    assert isinstance(found.value.__cause__, StageError)
    assert "reachable" in found.value.remedy
