"""A teacher that shares GPUs is built before its host, on made-up processes.

The host is built on the same GPUs only.
"""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from async_opd.cluster.actor_factory import ActorFactory, Factories
from async_opd.cluster.actor_shell import ActorPlacement, Remote
from async_opd.cluster.proxies import TeacherProxy
from async_opd.config.run_config import RunConfig
from async_opd.core.errors import EngineStartError


def config(start_s: float) -> RunConfig:
    return RunConfig.model_validate(
        {
            "student": {"model": "student"},
            "teachers": {"t": {"model": "t", "placement": "colocated", "with": "rollout"}},
            "data": {"train": "prompts.jsonl"},
            "timeouts": {"engine_start_s": start_s},
        }
    )


async def test_a_guest_that_does_not_go_to_sleep_is_ended_and_named() -> None:
    class Engine:
        name = "teacher t/0"
        killed = False

        async def call(self, *args: Any, timeout_s: float) -> None:
            await asyncio.Event().wait()

        def kill(self) -> None:
            self.killed = True

    actor_factory, engine = ActorFactory(config(0.01), "cpu", (), Factories(), print), Engine()

    async def teacher(name: str, index: int) -> TeacherProxy:
        remote: Any = engine
        return TeacherProxy(remote)

    actor_factory.teacher = teacher  # type: ignore[method-assign]
    with pytest.raises(EngineStartError, match=r"teacher t/0: did not go to sleep within 0\.01 s"):
        await asyncio.wait_for(actor_factory._start_asleep("t", 0), 5)
    assert (engine.killed, actor_factory.colocated) == (True, {})


class Handle:
    """Ray's handle of a process on the first GPU of ``node``, which builds everything."""

    def __init__(self, node: str) -> None:
        self.node = node
        self.built = 0
        self.pid = SimpleNamespace(remote=self._pid)
        self.place = SimpleNamespace(remote=self._place)
        self.build = SimpleNamespace(remote=self._build)

    async def _pid(self) -> int:
        return 1

    async def _place(self) -> ActorPlacement:
        return ActorPlacement(self.node, ("0",))

    async def _build(self, factory: str, args: tuple[Any, ...]) -> None:
        self.built += 1


class Guest(Handle):
    """A process on the node that reserves no GPU."""

    async def _place(self) -> ActorPlacement:
        return ActorPlacement(self.node, ())


async def started(actor_factory: ActorFactory, node: str) -> Handle:
    """Builds replica 0 of the student, whose process Ray has started on the node."""
    handle = Handle(node)
    remote = Remote("student/0", handle, 5)

    async def build() -> None:
        await remote.build("module:factory", (), 5)

    await actor_factory._build_after_teachers("rollout", {0: remote}, build)
    return handle


@pytest.fixture
def actor_factory() -> ActorFactory:
    """Its teachers start at once."""
    made = ActorFactory(config(5), "cuda", (), Factories(), print)

    async def start_asleep(name: str, index: int) -> None:
        teacher: Any = SimpleNamespace()
        made.colocated.setdefault(name, {})[index] = teacher

    made._start_asleep = start_asleep  # type: ignore[method-assign]
    return made


async def test_a_restarted_host_is_built_on_the_gpus_of_its_teachers(
    actor_factory: ActorFactory,
) -> None:
    await started(actor_factory, "a")
    assert (await started(actor_factory, "a")).built == 1


async def test_a_host_that_ray_restarted_on_other_gpus_than_its_teachers_is_refused(
    actor_factory: ActorFactory,
) -> None:
    await started(actor_factory, "a")
    words = "GPU 0 of node b, but it shares GPU 0 of node a"
    with pytest.raises(EngineStartError, match=words):
        await started(actor_factory, "b")


async def test_a_rank_that_ray_restarted_elsewhere_is_refused_when_it_is_built_again(
    actor_factory: ActorFactory,
) -> None:
    handle = Handle("a")
    remote = Remote("trainer", handle, 5)
    await actor_factory._build_after_teachers(
        "rollout", {0: remote}, lambda: remote.build("m", (), 5)
    )
    handle.node = "b"
    with pytest.raises(EngineStartError, match="it shares GPU 0 of node a"):
        await remote.build("m", (), 5)


async def test_a_guest_on_another_node_than_its_host_is_refused(
    actor_factory: ActorFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its variable CUDA_VISIBLE_DEVICES would name GPUs that others have there."""

    async def create(*args: Any, **named: Any) -> Remote:
        return Remote("teacher t/0", Guest("b"), 5)

    monkeypatch.setattr(actor_factory, "create", create)
    monkeypatch.setattr(Remote, "kill", lambda self: None)
    actor_factory.placements["rollout", 0] = ActorPlacement("a", ("0",))
    words = "GPU – of node b, but it shares GPU 0 of node a"
    with pytest.raises(EngineStartError, match=words):
        await actor_factory.teacher("t", 0)


async def test_a_guest_on_its_hosts_node_is_built(
    actor_factory: ActorFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    handle = Guest("a")

    async def create(*args: Any, **named: Any) -> Remote:
        return Remote("teacher t/0", handle, 5)

    monkeypatch.setattr(actor_factory, "create", create)
    actor_factory.placements["rollout", 0] = ActorPlacement("a", ("0",))
    await actor_factory.teacher("t", 0)
    assert handle.built == 1
