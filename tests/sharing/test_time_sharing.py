"""GPU time sharing of a pool and its teachers, alone: what a cancelled run leaves behind."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from async_opd.core.errors import StageError, StageTimeout
from async_opd.core.reports import Progress, SyncReport
from async_opd.sharing.time_sharing import GpuLock, GpuTimeSharing, SharedLock, holding
from tests.world.clock import ManualTimer, settle
from tests.world.sync import LockedSync


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

    async def take_turn(self, host: str) -> None:
        self.begun.set()
        await self.done.wait()
        self.begun.clear()


async def no_tokens() -> Progress:
    return Progress(0)


def lock(quiet_s: float = 100, timer: ManualTimer | None = None) -> GpuLock:
    return GpuLock("rollout", no_tokens, quiet_s, timer)


class World:
    def __init__(self, sleep_timeout_s: float = 5) -> None:
        self.engine, self.teachers = Engine(), Teachers()
        hosts = {"student/0": self.engine}
        self.sharing = GpuTimeSharing(
            "rollout", lambda: hosts, self.teachers, lock(), sleep_timeout_s=sleep_timeout_s
        )
        self.running: asyncio.Task[None] | None = None

    async def starts(self) -> None:
        self.running = asyncio.create_task(self.sharing.run())
        await settle()

    async def breaks_off(self) -> None:
        self.running.cancel()
        await asyncio.wait({self.running})

    async def begins(self) -> None:
        """A scoring phase begins."""
        self.teachers.full.set()
        await asyncio.wait_for(self.teachers.begun.wait(), 5)

    async def a_phase(self) -> None:
        """One scoring phase from start to end."""
        await self.begins()
        self.teachers.done.set()
        await settle()
        self.teachers.done.clear()
        assert not self.sharing.lock.locked()


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
    await world.sharing.lock.acquire("an earlier stage")
    hosts = {"student/0": world.engine}
    world.sharing = GpuTimeSharing(
        "rollout", lambda: hosts, world.teachers, world.sharing.lock, sleep_timeout_s=5, held=True
    )
    world.engine.awake = False
    pushing = asyncio.create_task(world.sharing.lock.acquire("a push"))
    await settle()
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
        async def push(self) -> SyncReport:
            awake.append(world.engine.awake)
            return SyncReport(1, {})

    sync: Any = LockedSync(Sync(), replicas=world.sharing.lock, trainer=None)
    await world.begins()
    await world.breaks_off()
    push = asyncio.create_task(sync.push())
    await settle()
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
    with pytest.raises(StageError, match="rollout: time sharing of its GPUs ended"):
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


async def quiet(timer: ManualTimer, times: int) -> None:
    """A quarter of the bound passes, so often."""
    for _ in range(times):
        await settle()
        timer.advance(25)


class Copies:
    """A sync that copies and sends when the test says so."""

    def __init__(self) -> None:
        self.begun: list[str] = []
        self.goes_on = asyncio.Event()
        self.dies = False

    async def snapshot(self, version: int, again: bool = False) -> None:
        await self._work("snapshot")

    async def push(self) -> SyncReport:
        await self._work("push")
        return SyncReport(1, {})

    async def _work(self, what: str) -> None:
        self.begun.append(what)
        await self.goes_on.wait()
        if self.dies:
            raise StageError("trainer", "its process died")


class TestLock:
    async def test_a_snapshot_that_begins_while_a_teacher_is_awake_on_its_gpus_waits(
        self, world: World
    ) -> None:
        copies = Copies()
        copies.goes_on.set()
        sync = LockedSync(copies, replicas=None, trainer=world.sharing.lock)
        await world.begins()
        snapshot = asyncio.create_task(sync.snapshot(1))
        await settle()
        assert (copies.begun, world.engine.awake) == ([], False)
        world.teachers.done.set()
        await asyncio.wait_for(snapshot, 5)
        assert copies.begun == ["snapshot"]

    @pytest.mark.parametrize("what", ["snapshot", "push"])
    async def test_no_teacher_wakes_while_weights_are_copied_or_sent(
        self, world: World, what: str
    ) -> None:
        copies = Copies()
        sync: Any = LockedSync(copies, replicas=None, trainer=world.sharing.lock)
        work = asyncio.create_task(sync.snapshot(1) if what == "snapshot" else sync.push())
        await settle()
        world.teachers.full.set()
        await settle()
        assert (copies.begun, world.engine.awake) == ([what], True)
        copies.goes_on.set()
        await asyncio.wait_for(work, 5)
        await asyncio.wait_for(world.teachers.begun.wait(), 5)

    async def test_a_death_while_it_is_held_frees_it(self) -> None:
        copies, gpus = Copies(), lock()
        copies.dies = True
        copies.goes_on.set()
        with pytest.raises(StageError, match="its process died"):
            await LockedSync(copies, replicas=gpus, trainer=lock()).push()
        assert not gpus.locked()

    async def test_a_wait_longer_than_the_run_may_stand_still_ends_with_the_holders_name(
        self,
    ) -> None:
        timer = ManualTimer()
        gpus = lock(100, timer)
        await gpus.acquire("a scoring phase")
        waiting = asyncio.create_task(gpus.acquire("a snapshot"))
        await quiet(timer, 4)
        words = "rollout: a snapshot waits for the GPUs, which a scoring phase has: .* for 100 s"
        with pytest.raises(StageTimeout, match=words):
            await asyncio.wait_for(waiting, 5)

    async def test_a_wait_while_tokens_are_computed_is_not_interrupted(self) -> None:
        timer, tokens = ManualTimer(), iter(range(1, 100))

        async def progress() -> Progress:
            return Progress(next(tokens))

        gpus = GpuLock("rollout", progress, 100, timer)
        await gpus.acquire("a scoring phase")
        waiting = asyncio.create_task(gpus.acquire("a snapshot"))
        await quiet(timer, 20)
        assert not waiting.done()
        gpus.release()
        await asyncio.wait_for(waiting, 5)

    @pytest.mark.parametrize("late", [False, True], ids=["before", "when"])
    async def test_a_call_cancelled_before_it_has_the_lock_or_when_it_gets_it_leaves_it_free(
        self, late: bool
    ) -> None:
        gpus = lock()
        await gpus.acquire("a scoring phase")
        waiting = asyncio.create_task(gpus.acquire("a snapshot"))
        await settle()
        if late:
            gpus.release()
            await asyncio.sleep(0)
        waiting.cancel()
        if not late:
            gpus.release()
        await settle()
        assert (waiting.cancelled(), gpus.locked()) == (True, False)

    async def test_rebuilds_wait_for_a_scoring_phase_together_and_exclude_the_next_one(
        self, world: World
    ) -> None:
        rebuilding, over = SharedLock(world.sharing.lock, "a rebuild"), asyncio.Event()
        inside: list[int] = []

        async def rebuild(index: int) -> None:
            async with rebuilding:
                inside.append(index)
                await over.wait()

        await world.begins()
        rebuilds = [asyncio.create_task(rebuild(index)) for index in range(2)]
        await settle()
        assert inside == []
        world.teachers.done.set()
        await settle()
        assert inside == [0, 1]
        world.teachers.done.clear()
        world.teachers.full.set()
        await settle()
        assert not world.teachers.begun.is_set()
        over.set()
        await asyncio.gather(*rebuilds)
        await asyncio.wait_for(world.teachers.begun.wait(), 5)

    async def test_of_several_locks_none_stays_held_if_one_cannot_be_had(self) -> None:
        timer = ManualTimer()
        first, second = lock(), lock(100, timer)
        await second.acquire("a scoring phase")

        async def both() -> None:
            async with holding("a weight sync", first, None, second):
                raise AssertionError

        waiting = asyncio.create_task(both())
        await quiet(timer, 4)
        with pytest.raises(StageTimeout):
            await asyncio.wait_for(waiting, 5)
        assert not first.locked()
