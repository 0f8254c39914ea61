"""GPUs that two pools share in a whole run: hosts, guests, and the engines' work on them."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from async_opd.core.batch import Batch
from async_opd.core.errors import StageError
from async_opd.core.reports import Progress, SyncReport
from async_opd.core.samples import Prompt, Rollout
from async_opd.core.stages import SamplingSpec
from async_opd.waiting.deadline import Gate
from tests.world.run import World
from tests.world.students import FakeStudent
from tests.world.teachers import FakeTeacher


@dataclass
class Gpu:
    """``awake`` use it now. More than one at a time is an error."""

    awake: set[str] = field(default_factory=set)
    users: list[str] = field(default_factory=list)

    def take(self, name: str) -> None:
        assert not self.awake, f"{name} wakes while {self.awake} are"
        self.awake.add(name)
        self.users.append(name)

    def leave(self, name: str) -> None:
        self.awake.remove(name)


class Host:
    """Everything it does goes through a gate, while no guest is awake."""

    def __init__(self, gpu: Gpu) -> None:
        self.gate, self.gpu = Gate(), gpu
        self.dead = self.dies = self.hangs = False
        self.requests = 0

    @property
    def works(self) -> bool:
        """Whether it takes requests, or is dead."""
        return self.dead or not self.gate.closed

    async def idle(self) -> None:
        await self.gate.empty()

    async def progress(self) -> Progress:
        return Progress(0)

    async def sleep(self) -> None:
        if self.hangs:
            await asyncio.Event().wait()
        if self.dies:
            self.dead = True
            raise StageError("student/0", "its process died")
        await self.gate.close()

    async def wake(self) -> None:
        assert not self.gpu.awake, f"the host wakes while {self.gpu.awake} are"
        self.gate.open()


class GuestTeacher:
    """A teacher that works only while it has the GPUs of its hosts."""

    def __init__(self, inner: FakeTeacher, gpu: Gpu, hosts: Sequence[Host]) -> None:
        self.inner, self.gpu, self.hosts = inner, gpu, hosts
        self.sizes: list[int] = []
        self.asleep = True
        self.fail_to_wake = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def kill(self) -> None:
        raise AssertionError(f"{self.name} went to sleep, and is ended all the same")

    async def wake(self) -> None:
        if self.fail_to_wake:
            self.fail_to_wake -= 1
            raise StageError(self.name, "out of memory")
        assert all(host.dead or host.gate.closed for host in self.hosts)
        self.gpu.take(self.name)
        self.asleep = False

    async def sleep(self) -> None:
        if not self.asleep:
            self.gpu.leave(self.name)
        self.asleep = True

    async def score(self, batch: Batch) -> Batch:
        assert not self.asleep, f"{self.name} is asked to score in its sleep"
        self.sizes.append(len(batch))
        return await self.inner.score(batch)

    async def generate(self, prompts: Sequence[Prompt], sampling: SamplingSpec) -> list[Rollout]:
        assert not self.asleep
        return await self.inner.generate(prompts, sampling)


def alive(name: str, hosts: Sequence[Host]) -> Mapping[str, Host]:
    """The hosts that live, by the names of a pool's members."""
    return {f"{name}/{index}": host for index, host in enumerate(hosts) if not host.dead}


def gate_student(student: FakeStudent, host: Host) -> None:
    """It samples and answers while its host is awake and no guest is."""

    def gated(call: Any) -> Any:
        async def on_gpu(*asked: Any) -> Any:
            async with host.gate:
                assert not host.gpu.awake, f"the student works while {host.gpu.awake} are awake"
                host.requests += 1
                try:
                    return await call(*asked)
                finally:
                    host.requests -= 1

        return on_gpu

    student.sample = gated(student.sample)  # type: ignore[method-assign]
    student.generate = gated(student.generate)  # type: ignore[method-assign]


def gate_sync(run: World, hosts: Sequence[Host]) -> None:
    """Weights are pushed while all students are awake."""
    push = run.sync.push

    async def guarded() -> SyncReport:
        assert all(host.works for host in hosts), "weights for a student that sleeps"
        return await push()

    run.sync.push = guarded  # type: ignore[method-assign]


def uids_of(run: World) -> list[str]:
    """What was trained."""
    return [uid for uid, _ in run.trainer.trained]
