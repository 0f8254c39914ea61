"""Processes of actors that die, hang and are built again, on no cluster."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

from async_opd.cluster.actor_shell import ActorPlacement
from async_opd.cluster.singleton_actors import TrainerActor
from async_opd.core.errors import (
    Displaced,
    EngineStartError,
    ProcessDied,
    ProcessRestarts,
    StageError,
    StageTimeout,
)


class FakeHandle:
    """Ray's handle of a process on a node, with these GPUs, which builds everything."""

    def __init__(self, node: str, *gpus: str) -> None:
        self.node, self.gpus = node, gpus
        self.built = 0
        for method in (self.place, self.build):
            setattr(self, method.__name__, SimpleNamespace(remote=method))

    async def place(self) -> ActorPlacement:
        return ActorPlacement(self.node, self.gpus)

    async def build(self, factory: str, args: tuple[Any, ...]) -> None:
        self.built += 1


class FakeProcess:
    """A singleton and its process, the ``number``-th one. ``hangs`` in whatever it is asked.

    One that is ``cut_off`` reaches no other process.
    ``broken`` builds fail; the build of one that ``waits_for`` another lasts until that one dies.
    """

    def __init__(
        self, name: str, events: list[str] | None = None, built: bool = True, hangs: bool = False
    ) -> None:
        self.name, self.built, self.hangs = name, built, hangs
        self.events: list[str] = [] if events is None else events
        self.remote: Any = self
        self.others: tuple[FakeProcess, ...] = ()
        self.engines: tuple[FakeProcess, ...] = ()
        self.cut_off = False
        self.number = 1
        self.broken = 0
        self.death = asyncio.Event()
        self.waits_for: FakeProcess | None = None
        self.placement_fault: StageError | None = None
        self.displacement: Displaced | None = None

    @property
    def ranks(self) -> tuple[FakeProcess, ...]:
        return (self, *self.others)

    @property
    def builds(self) -> int:
        return self.events.count(f"build {self.name}")

    @property
    def gone(self) -> bool:
        return f"kill {self.name}" in self.events

    def die(self) -> None:
        self.number += 1
        self.built = False
        self.death.set()
        self.death = asyncio.Event()

    async def end(self, bound: float = 0) -> ProcessDied | None:
        """Its error when it dies; with a bound, as the trainer's all ranks are ended."""
        if bound:
            await TrainerActor.end(cast(TrainerActor, self), bound)
            return None
        await self.death.wait()
        return ProcessRestarts(self.name, "its process died")

    async def pid(self, timeout_s: float) -> int:
        return 1

    async def placed(self) -> None:
        if self.placement_fault is not None:
            raise self.placement_fault

    async def displaced(self) -> Displaced | None:
        return self.displacement

    async def build(self) -> None:
        self.events.append(f"build {self.name}")
        if self.broken:
            self.broken -= 1
            raise EngineStartError(self.name, "did not start: its process died")
        if self.waits_for is not None:
            other, self.waits_for = self.waits_for, None
            other.die()
            await asyncio.Event().wait()
        self.built = True

    async def call(self, method: str, timeout_s: float) -> None:
        if self.hangs:
            raise StageTimeout(self.name, f"{method} took longer than {timeout_s:g} s")
        self.events.append(f"{method} {self.name}")

    async def reach(self, other: FakeProcess, timeout_s: float) -> None:
        if self.cut_off:
            raise StageTimeout(
                self.name, f"a call to {other.name} took longer than {timeout_s:g} s"
            )

    async def hand_over(self, bound: float) -> None:
        await self.call("hand_over", bound)

    async def stop(self, bound: float) -> None:
        await self.call("stop", bound)

    async def halt_replicas(self, bound: float) -> None:
        self.events.append("halt replicas")

    async def supply(self) -> None:
        await asyncio.Event().wait()

    async def is_built(self, timeout_s: float) -> bool:
        if self.hangs:
            raise StageTimeout(self.name, f"a sign of life took longer than {timeout_s:g} s")
        return self.built

    def kill(self) -> None:
        self.events.append(f"kill {self.name}")

    def restart(self) -> None:
        """Of the trainer all ranks get other processes."""
        for one in self.ranks:
            one.events.append(f"restart {one.name}")
            one.hangs = one.cut_off = False
            one.die()
