"""A student's replica on a fake engine: everything of it is real but the engine's processes."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock

from async_opd.core.stages import SamplingSpec
from async_opd.media.engine_prompts import EnginePrompts
from async_opd.observability.activity import Activity
from async_opd.waiting.deadline import Gate


class Watch:
    """An ExitWatch of no process."""

    async def within(self, work: Any) -> Any:
        return await work


def replica_on(engine: Any, name: str = "s", **parts: Any) -> Any:
    """A StudentReplica; ``parts`` are attributes of it."""
    from rollouter.evaluation_worker import EvaluationWorker
    from rollouter.replica import COUNTERS, StudentReplica
    from rollouter.slots import Slots

    made: Any = object.__new__(StudentReplica)
    made._engine, made._exit_watch = engine, Watch()
    made._spec = SimpleNamespace(
        kwargs={},
        name=name,
        sampling=SamplingSpec(4, 1.0, 1.0, 1),
        top_k=0,
        keeps_weights=False,
        request=lambda uid, sampling, top_k: {"max_tokens": 4, "logprobs": top_k},
    )
    made._prompts, made._never = EnginePrompts("student", None, None, None), {}
    made._activity, made._counters = Activity("generate"), dict.fromkeys(COUNTERS, 0.0)
    made._unpaused, made._syncing = asyncio.Event(), asyncio.Event()
    made._unpaused.set()
    made._gate, made._rollouts = Gate(), Gate()
    made._evaluation = EvaluationWorker(Slots(4), made._sample)
    made._worker = SimpleNamespace(rollouts=0, grading=0, stop=AsyncMock())
    made._slots = SimpleNamespace(limit=4)
    made._media = made._adapter = made._player = made._episodes = None
    made._mixed, made._version = "", 1
    made._requests = made._pending_tokens = made._syncs = 0
    made._total_paused_s = made._pause_started = 0.0
    for part, value in parts.items():
        setattr(made, part, value)
    return made
