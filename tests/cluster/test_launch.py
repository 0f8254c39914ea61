"""A teacher that shares GPUs is built before its host, on made-up processes."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from async_opd.cluster.actor_factory import ActorFactory, Factories
from async_opd.cluster.proxies import TeacherProxy
from async_opd.config.run_config import RunConfig
from async_opd.core.errors import EngineStartError


async def test_a_guest_that_does_not_go_to_sleep_is_ended_and_named() -> None:
    class Engine:
        name = "teacher t/0"
        killed = False

        async def call(self, *args: Any, timeout_s: float) -> None:
            await asyncio.Event().wait()

        def kill(self) -> None:
            self.killed = True

    config = RunConfig.model_validate(
        {
            "student": {"model": "student"},
            "teachers": {"t": {"model": "t", "placement": "colocated", "with": "rollout"}},
            "data": {"train": "prompts.jsonl"},
            "timeouts": {"engine_start_s": 0.01},
        }
    )
    actor_factory, engine = ActorFactory(config, "cpu", (), Factories(), print), Engine()

    async def teacher(name: str, index: int) -> TeacherProxy:
        remote: Any = engine
        return TeacherProxy(remote)

    actor_factory.teacher = teacher  # type: ignore[method-assign]
    with pytest.raises(EngineStartError, match=r"teacher t/0: did not go to sleep within 0\.01 s"):
        await asyncio.wait_for(actor_factory._start_asleep("t", 0), 5)
    assert (engine.killed, actor_factory.colocated) == (True, {})
