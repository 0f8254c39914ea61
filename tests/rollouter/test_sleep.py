"""A student replica while it sleeps, and the wait that it reports, on a fake."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from async_opd.core.errors import StageError, WorkersFailed
from async_opd.core.stages import SamplingSpec
from tests.conftest import make_prompt
from tests.world.clock import settle
from tests.world.replica import replica_on

pytestmark = pytest.mark.slow  # imports vLLM


class Engine:
    """Records its calls; waking up takes until ``woken``."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.woken = asyncio.Event()
        self.broken_sleep = ""

    async def collective_rpc(self, method: str, timeout: Any = None, args: Any = ()) -> Any:
        assert (method, args) == ("attempt", ("refuse_broken_sleep",))
        return [(None, ""), (None, self.broken_sleep)]

    async def check_health(self) -> None: ...

    async def pause_generation(self, **_: object) -> None: ...

    async def sleep(self, **_: object) -> None:
        self.calls.append("sleep")

    async def wake_up(self) -> None:
        self.calls.append("wake up")
        await self.woken.wait()


async def waits_for(student: Any) -> str:
    """The content of the replica's report."""
    said: str = (await student.report()).waits_for
    return said


@pytest.mark.parametrize("ends_while_waking", [True, False])
async def test_an_engine_that_was_woken_while_it_drained_does_not_sleep_behind_an_open_gate(
    ends_while_waking: bool,
) -> None:
    engine = Engine()
    student = replica_on(engine)
    await student._gate.__aenter__()
    sleeping = asyncio.create_task(student.sleep())
    await settle()
    waking = asyncio.create_task(student.wake())
    await settle()
    if not ends_while_waking:
        engine.woken.set()
        await waking
    await student._gate.__aexit__()
    await sleeping
    engine.woken.set()
    await waking
    assert (engine.calls, student._gate.closed) == (["wake up"], False)


async def test_an_engine_sleeps_when_its_requests_are_finished() -> None:
    engine = Engine()
    student = replica_on(engine)
    await student._gate.__aenter__()
    sleeping = asyncio.create_task(student.sleep())
    await settle()
    assert engine.calls == []
    await student._gate.__aexit__()
    await sleeping
    assert (engine.calls, student._gate.closed) == (["sleep"], True)


async def test_an_engine_that_is_stopped_sleeps_without_the_answers_of_an_evaluation() -> None:
    """Nobody waits for them after the trainer's death, however long they would take."""
    from rollouter.evaluation_worker import EvaluationWorker
    from rollouter.slots import Slots

    engine = Engine()
    student = replica_on(engine)

    async def long(*_: object) -> Any:
        async with student._gate:
            await asyncio.Event().wait()

    student._evaluation = EvaluationWorker(Slots(4), long)
    sampling = SamplingSpec(4, 0.0, 1.0, 1)
    answering = asyncio.create_task(student.generate([make_prompt("p")], sampling))
    await settle()
    await student.stop()
    await asyncio.wait_for(student.sleep(), 5)
    assert engine.calls == ["sleep"]
    with pytest.raises(StageError, match="the replica was stopped"):
        await answering


async def test_an_engine_of_which_a_worker_fails_to_wake_up_takes_no_requests() -> None:
    engine = Engine()
    student = replica_on(engine)
    await student.sleep()
    engine.broken_sleep = "MemoryError: no room"
    engine.woken.set()
    with pytest.raises(WorkersFailed, match="worker 1: MemoryError: no room"):
        await student.wake()
    assert student._gate.closed


async def test_an_idle_replica_waits_for_prompts_and_one_that_sleeps_for_its_gpu() -> None:
    student = replica_on(Engine())
    assert await waits_for(student) == "prompts (admission)"
    with student._activity.busy():
        assert await waits_for(student) == ""
    await student.sleep()
    assert await waits_for(student) == "its GPU, which others use"


async def test_a_paused_replica_waits_for_the_newest_weights() -> None:
    student = replica_on(Engine())
    await student.pause("keep")
    assert await waits_for(student) == "the newest weights"
    student._mixed = "some weights were replaced"
    with student._activity.busy():
        assert await waits_for(student) == "the newest weights"


class Sampling(Engine):
    """Answers a request when it is in ``done``; vLLM's pause ``wait`` waits for all requests."""

    def __init__(self) -> None:
        super().__init__()
        self.in_flight: dict[str, asyncio.Event] = {}
        self.version = 1
        vocabulary = SimpleNamespace(get_vocab_size=lambda: 99)
        self.vllm_config = SimpleNamespace(model_config=vocabulary)

    async def generate(self, request: Any, params: Any, name: str, **_: Any) -> Any:
        self.in_flight[name] = asyncio.Event()
        version = self.version
        try:
            await self.in_flight[name].wait()
        finally:
            del self.in_flight[name]
        span = SimpleNamespace(version=str(version), start=0, end=1)
        flat = SimpleNamespace(logprobs=[-1.0], token_ids=[5])
        yield SimpleNamespace(
            finished=True,
            num_cached_tokens=0,
            outputs=[
                SimpleNamespace(
                    token_ids=[5],
                    logprobs=flat,
                    weight_versions=[span],
                    finish_reason="stop",
                    routed_experts=None,
                )
            ],
        )

    async def pause_generation(self, *, mode: str, clear_cache: bool) -> None:
        while mode == "wait" and self.in_flight:
            await settle()

    async def resume_generation(self) -> None: ...


async def in_flight(on_sync: str) -> tuple[Sampling, Any, Any, Any, Any]:
    """A rollout and an evaluation's answer of the same uid, and the pause of a sync."""
    engine = Sampling()
    student = replica_on(engine)
    prompt = make_prompt("p")
    rollout = asyncio.create_task(student._roll(prompt, "p/0"))
    answer = asyncio.create_task(student.generate([prompt], SamplingSpec(4, 0.0, 1.0, 1)))
    await settle()
    assert len(engine.in_flight) == 2
    pause = asyncio.create_task(student.pause(on_sync))
    await settle()
    return engine, student, rollout, answer, pause


async def test_a_sync_that_finishes_rollouts_does_not_wait_for_an_evaluation() -> None:
    engine, student, rollout, answer, pause = await in_flight("finish")
    assert not pause.done()
    engine.in_flight["p/0#1"].set()
    assert (await rollout).version_spans[0].version == 1
    await asyncio.wait_for(pause, 5)
    assert not engine.in_flight
    engine.version = 2
    await student.resume()
    await settle()
    (again,) = engine.in_flight.values()
    again.set()
    (found,) = await asyncio.wait_for(answer, 5)
    assert found.version_spans[0].version == 2


@pytest.mark.parametrize("on_sync", ["keep", "recompute"])
async def test_a_sync_that_keeps_what_is_in_flight_keeps_an_evaluation_too(on_sync: str) -> None:
    engine, student, rollout, answer, pause = await in_flight(on_sync)
    await asyncio.wait_for(pause, 5)
    assert len(engine.in_flight) == 2
    await student.resume()
    for one in engine.in_flight.values():
        one.set()
    assert (await rollout).uid == (await answer)[0].uid == "p/0"
