"""Teachers on the GPUs of another pool: the pool and its teachers take turns.

    WORK ──a wave is held, or the hosts are idle and something is──► REST ──► SHIFT ──► WORK
    hosts work, teachers sleep                         hosts finish what     teachers, one after
                                                       they do, and sleep    the other

``lock`` is held from REST until the hosts work again; by a weight sync, since who sleeps takes no
weights; and by hosts that are built again, since teachers may have their GPUs. A shift that breaks
off (the trainer died) keeps it, until ``run`` has woken the hosts.

Never stops for ever: a shift waits for nothing but engines, since samples leave outside of it; and
without a shift the hosts come to rest by themselves, as the staleness budget ends what they may do.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Protocol

from async_opd.core.deadline import Deadline
from async_opd.core.errors import StageError, StageTimeout, first_cause
from async_opd.core.liveness import Progress, ProgressWatchdog
from async_opd.core.samples import Prompt, Rollout
from async_opd.core.stages import (
    Events,
    SamplingSpec,
    StageReport,
    SyncReport,
    TeacherScorer,
    WeightSync,
)

KEY = "timeouts.request_s"


class GpuHost(Protocol):
    """One engine, or the trainer, whose GPUs the teachers take over for a while."""

    async def idle(self) -> None:
        """Returns when it has nothing to do."""

    async def sleep(self) -> None:
        """Begins nothing more, finishes what it does, frees its GPUs."""

    async def wake(self) -> None:
        """Works again."""

    async def progress(self) -> Progress:
        """The tokens that it has computed, and those that it may still have to before it rests."""
        ...


class ColocatedTeachers(Protocol):
    """The teachers of all hosts: the scoring stage."""

    async def wait_asleep(self, host: str) -> None:
        """Returns when all teachers of the host sleep; for the beginning, and a restart."""

    async def wait_for_work(self, host: str) -> None:
        """Returns when a teacher of the host has something to do."""

    async def wait_for_backlog(self, host: str) -> None:
        """Returns when the host's teachers hold a wave together, or one is asked a question."""

    async def score_backlog(self, host: str) -> None:
        """They wake one after the other, most work first, do all they have, and sleep again."""


class GpuTimeSharing:
    """Alternates the hosts of one kind and their teachers. ``run`` never ends by itself."""

    def __init__(
        self,
        name: str,
        hosts: Callable[[], Mapping[str, GpuHost]],
        teachers: ColocatedTeachers,
        lock: asyncio.Lock,
        *,
        sleep_timeout_s: float,
    ) -> None:
        """``hosts`` are those that are alive now.

        What they do when they are to rest is finished, however long it takes: ``sleep_timeout_s``
        is the longest time without a token. It also bounds how long waking up may take.
        """
        self.lock = lock
        self.backlogs = 0
        self._asleep = False  # a shift has begun, and not all hosts work again
        self._name = name
        self._hosts = hosts
        self._teachers = teachers
        self._timeout_s = sleep_timeout_s
        self._idle: asyncio.Task[object] | None = None
        self._backlog: asyncio.Task[object] | None = None

    async def run(self) -> None:
        """One shift after the other, until cancelled; then it can begin again."""
        try:
            await self._teachers.wait_asleep(self._name)
            await self._resume_hosts()  # after a shift that broke off
            while True:
                await self._wait_until_due()
                await self.lock.acquire()
                self._asleep = True
                await self._all("sleep", self._put_to_sleep)
                await self._teachers.score_backlog(self._name)
                await self._resume_hosts()
                self.backlogs += 1
        finally:
            for waiting in (self._idle, self._backlog):
                if waiting is not None:
                    waiting.cancel()
            self._idle = self._backlog = None  # what was cancelled says nothing to the next run

    async def endless(self) -> None:
        """``run``; that it ends by itself is an error with a name, whatever has ended it."""
        try:
            await self.run()
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
        raise StageError(self._name, "turns with its teachers ended while the run was going on")

    async def _resume_hosts(self) -> None:
        """The hosts work again, and take weights."""
        await self._all("wake up", self._wake)
        self._idle = None  # they were idle in the shift: that says nothing of now
        if self._asleep:
            self._asleep = False
            self.lock.release()

    async def _wait_until_due(self) -> None:
        """Waits for work, then for enough of it or for hosts that have none.

        What is still waited for after the first of the two is kept for the next time.
        """
        await self._teachers.wait_for_work(self._name)
        self._backlog = self._backlog or asyncio.create_task(
            self._teachers.wait_for_backlog(self._name)
        )
        self._idle = self._idle or asyncio.create_task(self._all_idle())
        await asyncio.wait({self._backlog, self._idle}, return_when=asyncio.FIRST_COMPLETED)
        if self._backlog.done():
            self._backlog.result()
            self._backlog = None

    async def _all_idle(self) -> None:
        """One that died has nothing to do either."""
        idle = (host.idle() for host in self._hosts().values())
        await asyncio.gather(*idle, return_exceptions=True)

    async def _put_to_sleep(self, host: GpuHost) -> None:
        watchdog = ProgressWatchdog(self._name, self._timeout_s, KEY)
        await watchdog.within("going to sleep", host.sleep(), host.progress)

    async def _wake(self, host: GpuHost) -> None:
        remedy = f"raise {KEY} if an engine needs longer to wake up; otherwise it hangs"
        await Deadline(self._name).within(self._timeout_s, "waking up", host.wake(), remedy)

    async def _all(self, what: str, work: Callable[[GpuHost], Awaitable[None]]) -> None:
        """Of all hosts. One that dies meanwhile is its own pool's business."""
        hosts = self._hosts()
        results = await asyncio.gather(
            *(work(host) for host in hosts.values()), return_exceptions=True
        )
        for name, result in zip(hosts, results, strict=True):
            if isinstance(result, StageTimeout):
                cause = f"{name} could not {what}: {result.cause}"
                raise StageTimeout(self._name, cause, result.remedy) from result
            if isinstance(result, BaseException) and not isinstance(result, StageError):
                raise result


class SharedLock:
    """A lock that is held by several together: from the first that enters to the last that leaves.

    For hosts that are built again, which keep out a shift and a weight sync, not each other.
    """

    def __init__(self, lock: asyncio.Lock) -> None:
        self._lock = lock
        self._entering = asyncio.Lock()
        self._inside = 0

    async def __aenter__(self) -> None:
        async with self._entering:
            if not self._inside:
                await self._lock.acquire()
            self._inside += 1

    async def __aexit__(self, *error: object) -> None:
        self._inside -= 1
        if not self._inside:
            self._lock.release()


class LockedSync:
    """A weight sync that waits for the end of a shift, and is waited for by the next."""

    def __init__(self, inner: WeightSync, lock: asyncio.Lock) -> None:
        self._inner = inner
        self._lock = lock

    async def snapshot(self, version: int, again: bool = False) -> None:
        """See WeightSync.snapshot."""
        await self._inner.snapshot(version, again)

    async def push(self) -> SyncReport:
        """See WeightSync.push."""
        async with self._lock:
            return await self._inner.push()


class TimeSharingScorer:
    """The scoring stage, with the turns of its colocated teachers."""

    def __init__(self, inner: TeacherScorer, turns: Sequence[GpuTimeSharing]) -> None:
        self._inner = inner
        self._turns = turns

    async def run(self) -> None:
        """See TeacherScorer.run."""
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._inner.run(), name="scorer")
                for turns in self._turns:
                    group.create_task(turns.endless(), name="turns")
        except ExceptionGroup as errors:
            raise first_cause(errors) from errors

    async def generate(
        self, teacher: str, prompts: Sequence[Prompt], sampling: SamplingSpec
    ) -> list[Rollout]:
        """See TeacherScorer.generate."""
        return await self._inner.generate(teacher, prompts, sampling)

    async def progress(self) -> Progress:
        """See TeacherScorer.progress."""
        return await self._inner.progress()

    async def events(self, seen: int, wait: bool = True) -> Events:
        """See TeacherScorer.events."""
        return await self._inner.events(seen, wait)

    async def report(self) -> dict[str, StageReport]:
        """See TeacherScorer.report."""
        return await self._inner.report()
