"""GPU time sharing of a pool and its teachers, alone: what a cancelled run leaves behind."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from async_opd.core.errors import StageError, StageTimeout
from async_opd.core.stages import Progress, SyncReport
from teachers.time_sharing import GpuTimeSharing, LockedSync


class Engine:
    """A host that is busy until ``idles`` is set, and sleeps and wakes at once."""

    def __init__(self) -> None:
        self.awake = True
        self.idles = asyncio.Event()
        self.finished = asyncio.Event()
        self.finished.set()
        self.tokens = self.generates = 0

    async def idle(self) -> None:
        await self.idles.wait()

    async def progress(self) -> Progress:
        self.tokens += self.generates
        if self.tokens >= 1000:
            self.finished.set()
        return Progress(self.tokens, 1000)

    async def sleep(self) -> None:
        await self.finished.wait()
        self.awake = False

    async def wake(self) -> None:
        self.awake = True


class Teachers:
    """Colocated teachers with some work; ``full`` fills the backlog, ``done`` ends a phase."""

    def __init__(self) -> None:
        self.full = asyncio.Event()
        self.done = asyncio.Event()
        self.begun = asyncio.Event()
        self.broken: BaseException | None = None

    async def wait_asleep(self, host: str) -> None: ...

    async def wait_for_work(self, host: str) -> None: ...

    async def wait_for_backlog(self, host: str) -> None:
        await self.full.wait()
        self.full.clear()
        if self.broken is not None:
            raise self.broken

    async def score_backlog(self, host: str) -> None:
        self.begun.set()
        await self.done.wait()
        self.begun.clear()


class World:
    def __init__(self, sleep_timeout_s: float = 5) -> None:
        self.engine, self.teachers = Engine(), Teachers()
        hosts = {"student/0": self.engine}
        self.sharing = GpuTimeSharing(
            "rollout", lambda: hosts, self.teachers, asyncio.Lock(), sleep_timeout_s=sleep_timeout_s
        )
        self.running: asyncio.Task[None] | None = None

    async def starts(self) -> None:
        self.running = asyncio.create_task(self.sharing.run())
        await settled()

    async def breaks_off(self) -> None:
        assert self.running is not None
        self.running.cancel()
        await asyncio.wait({self.running})

    async def a_phase(self) -> None:
        """One scoring phase from start to end."""
        self.teachers.full.set()
        await asyncio.wait_for(self.teachers.begun.wait(), 5)
        self.teachers.done.set()
        await settled()
        self.teachers.done.clear()
        assert not self.sharing.lock.locked()


async def settled() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


@pytest.fixture
async def world() -> AsyncIterator[World]:
    made = World()
    await made.starts()
    yield made
    await made.breaks_off()


async def test_time_sharing_goes_on_when_a_run_begins_again(world: World) -> None:
    await world.a_phase()
    await world.breaks_off()
    await world.starts()
    await world.a_phase()
    await world.a_phase()


async def test_nobody_takes_the_gpus_before_the_hosts_are_awake_that_another_one_put_to_sleep() -> (
    None
):
    world = World()
    await world.sharing.lock.acquire()
    hosts = {"student/0": world.engine}
    world.sharing = GpuTimeSharing(
        "rollout", lambda: hosts, world.teachers, world.sharing.lock, sleep_timeout_s=5, held=True
    )
    world.engine.awake = False
    pushing = asyncio.create_task(world.sharing.lock.acquire())
    await settled()
    assert not pushing.done()
    await world.starts()
    assert (pushing.done(), world.engine.awake) == (True, True)
    await world.breaks_off()


async def test_hosts_that_were_waited_for_before_do_not_count_as_idle_in_the_next_run(
    world: World,
) -> None:
    await world.breaks_off()
    await world.starts()
    assert (world.teachers.begun.is_set(), world.engine.awake) == (False, True)


async def test_no_weights_are_pushed_after_a_phase_that_broke_off_before_the_hosts_wake(
    world: World,
) -> None:
    awake: list[bool] = []

    class Sync:
        snapshot = None

        async def push(self) -> SyncReport:
            awake.append(world.engine.awake)
            return SyncReport(1, {})

    sync: Any = LockedSync(Sync(), world.sharing.lock)  # type: ignore[arg-type]
    world.teachers.full.set()
    await asyncio.wait_for(world.teachers.begun.wait(), 5)
    await world.breaks_off()
    push = asyncio.create_task(sync.push())
    await settled()
    await world.starts()
    await asyncio.wait_for(push, 5)
    assert awake == [True]


@pytest.mark.parametrize("broken", [asyncio.CancelledError(), None], ids=["cancelled", "returned"])
async def test_time_sharing_that_ends_while_the_run_goes_on_is_an_error(
    world: World, broken: BaseException | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def ends() -> None:
        if broken is not None:
            raise broken

    monkeypatch.setattr(world.sharing, "run", ends)
    with pytest.raises(StageError, match="rollout: time sharing with its teachers ended"):
        await asyncio.wait_for(world.sharing.endless(), 5)


async def test_a_host_has_all_the_time_that_its_responses_take_to_go_to_sleep() -> None:
    world = World(sleep_timeout_s=0.04)
    world.engine.finished.clear()
    world.engine.generates = 100  # ten probes, of four within the bound
    await world.starts()
    await world.a_phase()
    await world.breaks_off()


async def test_a_host_that_generates_nothing_and_does_not_sleep_ends_the_run() -> None:
    world = World(sleep_timeout_s=0.04)
    world.engine.finished.clear()
    await world.starts()
    world.teachers.full.set()
    assert world.running is not None
    words = "student/0 could not sleep: going to sleep: no new token for 0.04 s"
    with pytest.raises(StageTimeout, match=words) as caught:
        await asyncio.wait_for(world.running, 5)
    assert "raise timeouts.request_s" in caught.value.remedy
