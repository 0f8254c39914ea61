"""One engine of the student by ``rollouter.replica``, without a run: speed, sleep, a fault.

tokens_per_s  tokens of greedy answers, all at once, after a first round
start_s       until the engine answers
asleep_gib    GPU memory of an engine that sleeps; ``awake_gib``: of one that does not; of several
              GPUs, the largest
same_first    share of the answers that begin after its sleep, or the fault, with the same token as
              before: later tokens follow one rounding of a kernel
faulty_workers
              those that answer with a fault: the last one has no memory for a tensor
in_step       1 if the next call gets every worker's answer to that call
"""

from __future__ import annotations

import asyncio
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from async_opd.config.sections.engine import EngineConfig
from async_opd.core.errors import WorkersFailed
from async_opd.core.samples import Prompt
from async_opd.core.stages import SamplingSpec
from async_opd.core.uid import Uid
from async_opd.models.engine_args import engine_env, engine_kwargs
from async_opd.queue.message_queue import MessageQueue
from async_opd.tools.first_steps.command import packaged
from async_opd.tools.qualify.measurements.measuring import (
    Figures,
    Report,
    used_gib,
    without_trainers_allocator,
)
from async_opd.tools.qualify.measurements.students import student
from rollouter.freshness_worker import FreshnessWorker

SIZES = {"cuda": ("qwen3-0.6b", 256, 256), "cpu": ("tiny", 4, 8)}
"""Shape of the student, prompts, and tokens of each answer."""
PROMPT_TOKENS = 32
SETTINGS: dict[str, dict[str, Any]] = {
    "as configured": {},
    "no CUDA graphs": {"extra": {"enforce_eager": True}},
    "half the requests": {"max_num_seqs": 128},
    "twice the requests": {"max_num_seqs": 512},
    "half the tokens": {"max_num_batched_tokens": 4096},
    "twice the tokens": {"max_num_batched_tokens": 16384},
}
"""Of the engine's section, by the names of cells."""


class FailingWorker(FreshnessWorker):
    """``on_workers`` calls its methods by name."""

    if TYPE_CHECKING:
        rank: int
        device: torch.device

    def exhaust(self, failing: int) -> None:
        """Asks for 2^50 bytes of its device's memory, in the worker of this number only."""
        if self.rank == failing:
            torch.empty(1 << 50, dtype=torch.uint8, device=self.device)

    def number(self) -> int:
        """Its own among the workers."""
        return self.rank


def saved(folder: Path, shape: str) -> str:
    """A random student of this shape in bfloat16, with the tokenizer of the quickstart's."""
    given = packaged() / "quickstart" / "models" / "student"
    shutil.copytree(given, folder, ignore=shutil.ignore_patterns("*.safetensors", "config.json"))
    student(shape, torch.device("cpu")).bfloat16().save_pretrained(folder)
    return str(folder)


class Engine:
    """A replica of the student and what it is asked. Made on a running event loop."""

    def __init__(self, model: str, device: str, settings: dict[str, Any], workers: int = 1) -> None:
        from rollouter.replica import StudentReplica
        from rollouter.spec import StudentEngineSpec

        kwargs = engine_kwargs(
            EngineConfig(**settings),
            model=model,
            device="cuda" if device == "cuda" else "cpu",
            tensor_parallel=workers,
            seed=0,
            trust_remote_code=False,
            sleeps=True,
        )
        _, count, tokens = SIZES[device]
        self._sampling = SamplingSpec(tokens, 0.0, 1.0, 1)
        transport = "shared_memory" if device == "cuda" else "gloo"
        spec = StudentEngineSpec("student/0", kwargs, self._sampling, (), transport)
        queue: Any = MessageQueue(("prompts", "dead"), 1000, 1 << 30, 60.0)
        self.replica = StudentReplica(spec, queue)
        ids = np.random.default_rng(0).integers(3, 100, (count, PROMPT_TOKENS), dtype=np.int32)
        self._prompts = [Prompt(Uid(f"p{i}"), "s", "t", row) for i, row in enumerate(ids)]

    async def answers(self) -> list[list[int]]:
        """Greedy ones, of all prompts at once."""
        rollouts = await self.replica.generate(self._prompts, self._sampling)
        return [rollout.response_ids.tolist() for rollout in rollouts]


async def speed(model: str, device: str, settings: dict[str, Any]) -> Figures:
    """Of an engine with these settings."""
    started = time.perf_counter()
    engine = Engine(model, device, settings)
    try:
        await engine.replica.ready()
        start_s = time.perf_counter() - started
        await engine.answers()
        started = time.perf_counter()
        tokens = sum(map(len, await engine.answers()))
        seconds = time.perf_counter() - started
        return {"tokens_per_s": tokens / seconds, "start_s": start_s}
    finally:
        await engine.replica.shutdown()


async def sleep(model: str, device: str, workers: int) -> Figures:
    """Sleeps and wakes twice. The figures of memory are above what was in use before."""
    outside = used_gib()

    def taken() -> float:
        pairs = zip(used_gib(), outside, strict=True)
        return max((now - before for now, before in pairs), default=0.0)

    engine = Engine(model, device, {}, workers)
    try:
        await engine.replica.ready()
        before = await engine.answers()
        awake = taken()
        for _ in range(2):
            started = time.perf_counter()
            await engine.replica.sleep()
            slept, asleep = time.perf_counter(), taken()
            await engine.replica.wake()
            woken = time.perf_counter()
        same = same_first(before, await engine.answers())
        found = {"same_first": same, "sleep_s": slept - started, "wake_s": woken - slept}
        memory = {"awake_gib": awake, "asleep_gib": asleep} if device == "cuda" else {}
        return found | memory
    finally:
        await engine.replica.shutdown()


async def fault(model: str, device: str, workers: int) -> Figures:
    """One worker of several has no memory for a tensor; the engine goes on."""
    from rollouter import engine as module

    module.EXTENSION = f"{__name__}.FailingWorker"  # type: ignore[attr-defined]
    engine = Engine(model, device, {}, workers)
    try:
        await engine.replica.ready()
        before = await engine.answers()
        faults: tuple[str, ...] = ()
        try:
            await engine.replica._rpc("exhaust", workers - 1)
        except WorkersFailed as error:
            faults = error.faults
        numbers = await engine.replica._rpc("number")
        return {
            "faulty_workers": sum(map(bool, faults)),
            "in_step": float(numbers == list(range(workers))),
            "same_first": same_first(before, await engine.answers()),
        }
    finally:
        await engine.replica.shutdown()


def same_first(before: Sequence[list[int]], after: Sequence[list[int]]) -> float:
    """The share of answers with the same first token."""
    pairs = list(zip(before, after, strict=True))
    return sum(one[:1] == other[:1] for one, other in pairs) / len(pairs)


def finished(work: Callable[[], Coroutine[Any, Any, Figures]]) -> Figures:
    """Runs it to its end, on a new event loop."""
    return asyncio.run(work())


def main(report: Report, kind: str) -> None:
    """Of the kinds ``speed``, ``sleep``, ``parallel`` and ``fault``.

    The last two are sleep and a fault of an engine of two workers; on a CPU of one.
    """
    device = report.device.type
    without_trainers_allocator(report.device)
    os.environ.update(engine_env("cuda" if device == "cuda" else "cpu", trusted=True))
    with tempfile.TemporaryDirectory() as folder:
        model = saved(Path(folder) / "student", SIZES[device][0])
        if kind != "speed":
            workers = 1 if kind == "sleep" or device == "cpu" else 2
            measured, what = (fault, "fault") if kind == "fault" else (sleep, "sleep")
            work = partial(measured, model, device, workers)
            report.cell(partial(finished, work), what=what, workers=workers)
            return
        for name, settings in SETTINGS.items():
            one = partial(speed, model, device, settings)
            report.cell(partial(finished, one), what="speed", settings=name)
        rates = {cell["settings"]: cell.get("tokens_per_s", 0.0) for cell in report.cells}
        best = max(rates.values()) or 1.0
        share = {"share_of_best": rates["as configured"] / best}
        report.cell(lambda: share, what="share")
