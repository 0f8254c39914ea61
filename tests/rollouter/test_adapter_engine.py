"""A real engine that applies the trainer's adapters: what it samples from, and faults in it."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from async_opd.config.sections.train import LoraConfig
from async_opd.core.samples import Prompt
from async_opd.core.stages import SamplingSpec
from tests.engines import reference_logprobs

pytestmark = [pytest.mark.engine, pytest.mark.usefixtures("engines_fork")]

LORA = LoraConfig(rank=5, alpha=10, sync="adapter")
FAULTS = ("adapter ignored", "adapter dropped", "adapter without a layer", "adapter scaled")
STEP = 0.05


@dataclass
class Seen:
    """Distances in nats between the engine and the trainer, and what else was measured."""

    before: float = 0.0
    after: list[float] = field(default_factory=list)
    moved: float = 0.0
    spans: list[Any] = field(default_factory=list)
    mib: float = 0.0
    reasons: dict[str, str] = field(default_factory=dict)
    learned: float = 0.0
    alarms: int = 0
    rebuilt: float = 0.0


def prompt(uid: str) -> Prompt:
    return Prompt(uid, "s", "t", np.arange(5, 25, dtype=np.int32))


async def distance(w: Any) -> float:
    """Largest difference of a response's log-probabilities from the trainer's own."""
    (one,) = await w.replicas[0].generate([prompt("now")], SamplingSpec(16, 1.0, 1.0, 1))
    table = reference_logprobs(w.model, one.prompt.token_ids, one.response_ids)
    own = table[np.arange(len(table)), one.response_ids]
    return float(np.abs(own - one.rollout_logprobs).max())


async def pushed_while_it_generates(w: Any) -> tuple[list[int], float]:
    """The versions of responses that a sync interrupts, and what the sync sent, in MiB.

    Held rows are scored beside them, before and after they are through.
    """
    replica, begun = w.replicas[0], asyncio.Event()
    w.version += 1
    await w.sync.snapshot(w.version)
    replica._slots.resize = lambda limit: begun.set()  # called after each step of the engine
    prompts = [prompt(f"long {number}") for number in range(3)]
    work = replica.generate(prompts, SamplingSpec(230, 1.0, 1.0, 1))
    answering = asyncio.create_task(work)
    await begun.wait()
    metrics = (await w.sync.push()).metrics
    (spans,) = {tuple(span.version for span in one.version_spans) for one in await answering}
    return list(spans), metrics["sync/mib"]


async def scenario(path: Path) -> Seen:
    from benchmarks.freshness_faults import caught
    from benchmarks.freshness_world import make_student, world

    seen = Seen()
    # vLLM would wrap the head of a Qwen3 for adapters, too.
    async with world(make_student(path, "qwen3"), "float32", lora=LORA) as w:
        seen.before = await distance(w)
        w.move(STEP)
        w.move(STEP)
        seen.moved = await distance(w)
        seen.spans, seen.mib = await pushed_while_it_generates(w)
        seen.after.append(await distance(w))
        w.move(STEP)
        seen.learned = (await w.push())["sync/learned_parameters"]
        seen.after.append(await distance(w))
        seen.alarms = len(w.failures)
        for fault in FAULTS:
            seen.reasons[fault] = await caught(w, fault, 1e-4)
        seen.rebuilt = await distance(w)
    return seen


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> Seen:
    return asyncio.run(asyncio.wait_for(scenario(tmp_path_factory.mktemp("student")), 500))


def test_the_engine_is_the_base_with_the_newest_adapter(seen: Seen) -> None:
    assert seen.moved > 0.1
    assert max(seen.before, *seen.after, seen.rebuilt) < 1e-4  # also one that joins again


def test_a_response_in_flight_goes_on_with_the_new_adapter(seen: Seen) -> None:
    assert seen.spans == [0, 1]


def test_only_adapters_are_sent(seen: Seen) -> None:
    entries = 2 * LORA.entries([(128, 128), (64, 128), (64, 128), (128, 128), *3 * [(256, 128)]])
    assert seen.mib == pytest.approx(4 * entries / 2**20)


def test_every_tensor_of_the_adapter_is_compared_bit_for_bit(seen: Seen) -> None:
    assert (seen.learned, seen.alarms) == (2 * 2 * 7, 0)


@pytest.mark.parametrize("fault", FAULTS)
def test_an_engine_with_another_adapter_is_caught_within_one_sync(fault: str, seen: Seen) -> None:
    """By a step of 1e-4, which the log-probabilities of held rows need not show."""
    assert "student/0" in seen.reasons[fault]
