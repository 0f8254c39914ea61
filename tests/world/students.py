"""The student: the real worker without an engine, and replicas that die, hang and take weights."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from async_opd.core.errors import ProcessDied, StageError
from async_opd.core.reports import Interval, Progress, StageReport
from async_opd.core.samples import Prompt, Rollout, VersionSpan
from async_opd.core.stages import SamplingSpec
from async_opd.media.cache import MediaCache
from rollouter.rollout_worker import RolloutWorker
from rollouter.slots import Slots
from tests.conftest import make_rollout
from tests.world.clock import Pace
from tests.world.prompts import IMAGE_BYTES
from tests.world.sync import Receiver


async def fetch(cache: MediaCache, prompt: Prompt, uid: str) -> None:
    """What an engine or a rank does with the images of a prompt; a message has none of them."""
    assert not prompt.encoded
    got = await cache.get(prompt.media, of=uid)
    assert [hashlib.sha256(one).hexdigest() for one in got] == [m.sha256 for m in prompt.media]


class FakeStudent:
    """The real worker, and no engine; a test may replace ``sample``, ``rollout`` and ``grade``."""

    def __init__(self, name: str, queue: Any, n: int, pace: Pace) -> None:
        self.name = self.consumer = name
        self.version = self.tokens = 0
        self.pace = pace
        self.worker = RolloutWorker(
            name, queue, Slots(4, n), lambda *asked: self.sample(*asked), lambda it: self.grade(it)
        )
        self.media = MediaCache(queue.media, IMAGE_BYTES)
        self.fail_at: int | None = None
        self.started: list[tuple[str, int]] = []

    async def run(self) -> None:
        await self.worker.run()

    async def alive(self) -> None: ...
    async def stop(self) -> None: ...

    async def sample(self, prompt: Prompt, uid: str) -> Rollout:
        if self.fail_at is not None and len(self.started) >= self.fail_at:
            raise StageError(self.name, "its process died")
        self.started.append((uid, self.version))
        version = self.version
        await self.pace.wait()
        await fetch(self.media, prompt, uid)
        return self.rollout(prompt, int(uid.rpartition("/")[2]), version)

    async def grade(self, rollout: Rollout) -> Rollout:
        return rollout

    def rollout(self, prompt: Prompt, index: int, version: int) -> Rollout:
        spans: tuple[VersionSpan, ...] = (VersionSpan(version, 0, 4),)
        if version != self.version:
            spans = VersionSpan(version, 0, 2), VersionSpan(self.version, 2, 4)
        ids = np.arange(4, dtype=np.int32)
        logprobs = np.zeros(4, dtype=np.float32)
        return Rollout.plain(f"{prompt.uid}/{index}", prompt, ids, logprobs, spans, "stop")

    async def progress(self) -> Progress:
        return Progress(self.tokens)

    async def generate(self, prompts: Sequence[Prompt], sampling: SamplingSpec) -> list[Rollout]:
        version = self.version
        await self.pace.wait()
        for prompt in prompts:
            await self.media.get(prompt.media, of=prompt.uid)
        indices = range(sampling.n)
        return [self.rollout(prompt, index, version) for prompt in prompts for index in indices]

    async def report(self) -> StageReport:
        return StageReport(gauges={"version": float(self.version)})


class FakeReplica(Receiver):
    """A replica without worker and engine, from ``life`` to life; it has new weights as Receiver.

    It runs until it ``dies``, answers nothing while it ``hangs``, and its calls in ``holds`` wait
    for ``goes_on``. ``calls`` are those of ``run`` and ``generate``, with the weights' version.
    """

    def __init__(self, name: str, life: int = 0, holds: Sequence[str] = (), hang: str = "") -> None:
        super().__init__(hang=hang)
        self.name, self.life, self.holds = name, life, holds
        self.consumer = f"{name}#{life}"
        self.version = life
        self.over, self.goes_on = asyncio.Event(), asyncio.Event()
        self.hangs = self.asleep = False
        self.calls: list[tuple[str, int]] = []
        self.counters: dict[str, float] = {}
        self.digests: dict[str, str] = {}
        self.waits_for = ""
        self.busy: tuple[Interval, ...] = ()

    def die(self) -> None:
        self.over.set()

    def kill(self) -> None:
        self.events.append("kill")
        self.over.set()

    @property
    def killed(self) -> bool:
        return "kill" in self.events

    async def reach(self, call: str) -> None:
        """Returns when a call may go on. ProcessDied if the process is over."""
        if call in self.holds:
            await self.goes_on.wait()
        if self.hangs:
            await asyncio.Event().wait()
        if self.over.is_set():
            raise ProcessDied(self.name, "its process died")

    async def ready(self) -> int:
        return 2

    async def run(self) -> None:
        self.calls.append(("run", self.version))
        await self.over.wait()
        raise ProcessDied(self.name, "its process died")

    async def alive(self) -> None:
        await self.reach("alive")

    async def displaced(self) -> None: ...

    async def generate(self, prompts: Sequence[Prompt], sampling: SamplingSpec) -> list[Rollout]:
        version = self.version
        self.calls.append(("generate", version))
        await self.reach("generate")
        return [make_rollout(f"{prompt.uid}/0", version=version) for prompt in prompts]

    async def write_weights(self, directory: str, sent: dict[str, str]) -> list[str]:
        await self.reach("write_weights")
        return sorted({name for name, _ in sent.items() ^ self.digests.items()})

    async def join(self, rendezvous: Any, rank_offset: int) -> None:
        await self.reach("join")
        await super().join(rendezvous, rank_offset)

    async def pause(self, on_sync: str) -> None:
        assert not self.asleep
        if "pause" in self.holds:
            await self.goes_on.wait()
        await super().pause(on_sync)

    async def receive(self, meta: Any) -> None:
        await self.reach("receive")
        await super().receive(meta)

    async def stop(self) -> None:
        await self.reach("stop")
        await self.part("stop")

    async def stop_evaluation(self) -> None:
        await self.reach("stop")
        await self.part("stop evaluation")

    async def sleep(self) -> None:
        assert not self.paused
        await self.part("sleep")
        self.asleep = True

    async def wake(self) -> None:
        self.asleep = False

    async def idle(self) -> None:
        await asyncio.Event().wait()

    async def report(self) -> StageReport:
        await self.reach("report")
        gauges = {"version": float(self.version)}
        return StageReport(self.counters, gauges, busy=self.busy, waits_for=self.waits_for)
