"""GPU time sharing: a pool of GPU hosts and its guests alternate on the same GPUs.

    WORK ──backlog full, or hosts idle and backlog not empty──► SLEEP ──► TURN ──► WORK
    hosts work, guests sleep                      hosts finish their      guests work, teachers
                                                  requests, and sleep     one after the other

Guests are the colocated teachers of a pool, whose turn is a scoring phase; or, of rollout engines,
the trainer (``async_opd.sharing.gpu_turns``), whose backlog is full as soon as some of its work
waits for the GPUs.

Each pool of hosts has one ``GpuLock``. Its holders: ``run``, from SLEEP until the hosts work again;
a snapshot and a weight sync, because they allocate on the trainer's GPUs, and a host that sleeps
takes no weights; a rebuild of hosts, because guests may have their GPUs. A turn that is cancelled
(the trainer died) does not release it: the next ``run`` does, when the hosts are awake. A
teacher's replica is rebuilt in its own turn of a scoring phase (``teachers.replica_slots``).

No deadlock: a scoring phase waits for engines only, since samples enter the queue outside of it;
the trainer's turn ends whatever the trainer waits for; and without a turn the hosts become idle,
since the staleness budget limits their work.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Protocol

from async_opd.core.errors import StageError, StageTimeout
from async_opd.core.reports import Progress
from async_opd.waiting.deadline import Deadline, Timer, gather_or_cancel, race
from async_opd.waiting.liveness import Ask, ProgressWatchdog

KEY = "timeouts.request_s"


class GpuHost(Protocol):
    """One engine, or the trainer, whose GPUs its guests use while it sleeps."""

    async def idle(self) -> None:
        """Returns when the host has no work."""

    async def sleep(self) -> None:
        """Starts no more work, finishes the current work, frees the GPUs."""

    async def wake(self) -> None:
        """Takes the GPUs back, and works again."""

    async def progress(self) -> Progress:
        """The tokens that the host has computed, and those it may compute before it sleeps."""
        ...


class GpuGuests(Protocol):
    """Guests of pools of hosts: the scoring stage has those that are teachers."""

    async def wait_asleep(self, host: str) -> None:
        """Returns when all guests of the host sleep, and no turn of theirs is under way.

        For a start, and a restart.
        """

    async def wait_for_work(self, host: str) -> None:
        """Returns when a guest of the host has work: a rollout to score, a request, a step."""

    async def wait_for_backlog(self, host: str) -> None:
        """Returns when the host's backlog is full, or one of its guests has a request."""

    async def take_turn(self, host: str) -> None:
        """The guests wake, do their work and sleep; teachers one by one, the largest first."""

    async def progress(self) -> Progress:
        """The tokens that the guests have computed."""
        ...


class SeveralGuests:
    """Guests of the same hosts as one: in a turn one after the other, in the order given."""

    def __init__(self, *guests: GpuGuests) -> None:
        self._guests = guests

    async def wait_asleep(self, host: str) -> None:
        """Returns when all of them sleep."""
        await gather_or_cancel(*(guest.wait_asleep(host) for guest in self._guests))

    async def wait_for_work(self, host: str) -> None:
        """Returns when one of them has work."""
        await race(*(guest.wait_for_work(host) for guest in self._guests))

    async def wait_for_backlog(self, host: str) -> None:
        """Returns when the backlog of one of them is full."""
        await race(*(guest.wait_for_backlog(host) for guest in self._guests))

    async def take_turn(self, host: str) -> None:
        """One without work wakes nothing."""
        for guest in self._guests:
            await guest.take_turn(host)

    async def progress(self) -> Progress:
        """The tokens of all of them."""
        found = await gather_or_cancel(*(guest.progress() for guest in self._guests))
        return Progress(sum(one.tokens for one in found), sum(one.most for one in found))


class GpuLock:
    """Its holder alone wakes, starts or puts to sleep what shares the GPUs of a pool, or allocates.

    A wait for it lasts as long as tokens are computed: after ``quiet_s`` (``timeouts.stall_s``)
    without a new one in ``progress`` it raises StageTimeout, which names the holder.
    """

    def __init__(
        self, pool: str, progress: Ask, quiet_s: float, timer: Timer | None = None
    ) -> None:
        self._pool = pool
        self._progress = progress
        self._watchdog = ProgressWatchdog(pool, quiet_s, "timeouts.stall_s", timer)
        self._lock = asyncio.Lock()
        self._holder = ""

    def locked(self) -> bool:
        """Whether it is held."""
        return self._lock.locked()

    async def acquire(self, what: str) -> None:
        """Waits for it; ``what`` it is then held for."""
        taking = asyncio.create_task(self._lock.acquire())
        try:
            ended = asyncio.wait({taking})
            await self._watchdog.within("waiting", ended, self._progress, sys.maxsize)
        except BaseException as error:
            taking.cancel()
            taking.add_done_callback(self._given_up)
            if isinstance(error, StageTimeout):
                cause = f"{what} waits for the GPUs, which {self._holder} has: {error.cause}"
                raise StageTimeout(self._pool, cause, error.remedy) from error
            raise
        self._holder = what

    def _given_up(self, taking: asyncio.Task[bool]) -> None:
        """Releases a lock that the task got at the moment at which its caller gave up."""
        if not taking.cancelled():
            self._lock.release()

    def release(self) -> None:
        """Lets the next one have it."""
        self._lock.release()


@asynccontextmanager
async def holding(what: str, *locks: GpuLock | None) -> AsyncIterator[None]:
    """Holds all locks, taken in this order; None is the lock of a pool that shares no GPUs.

    Without a deadlock only if every holder of several takes them in the same order: that of the
    replicas before that of the trainer.
    """
    async with AsyncExitStack() as held:
        for lock in locks:
            if lock is not None:
                await lock.acquire(what)
                held.callback(lock.release)
        yield


class GpuTimeSharing:
    """Alternates between the hosts of one pool and their guests. ``run`` returns never."""

    def __init__(
        self,
        name: str,
        hosts: Callable[[], Mapping[str, GpuHost]],
        guests: GpuGuests,
        lock: GpuLock,
        *,
        sleep_timeout_s: float,
        held: bool = False,
        turn: str = "a scoring phase",
    ) -> None:
        """``hosts()`` returns those that are alive now; ``turn`` is what guests do, in errors.

        ``held`` says that ``lock`` is taken already: an earlier scheduler may have died in a
        turn. ``run`` releases it when the hosts work again.

        A host finishes its requests before it sleeps, however long they take: ``sleep_timeout_s``
        bounds the seconds without a new token. It also bounds the seconds that waking up takes.
        """
        self.lock = lock
        self._asleep = held  # from SLEEP until all hosts work again
        self._name = name
        self._hosts = hosts
        self._guests = guests
        self._turn = turn
        self._timeout_s = sleep_timeout_s
        self._idle: asyncio.Task[object] | None = None
        self._backlog: asyncio.Task[object] | None = None

    async def run(self) -> None:
        """Alternates until cancelled. A later call continues where it was cancelled."""
        try:
            await self._guests.wait_asleep(self._name)
            await self._resume_hosts()  # an earlier call may have left them asleep
            while True:
                await self._wait_until_due()
                await self.lock.acquire(self._turn)
                self._asleep = True
                await self._all("sleep", self._put_to_sleep)
                await self._guests.take_turn(self._name)
                await self._resume_hosts()
        finally:
            for waiting in (self._idle, self._backlog):
                if waiting is not None:
                    waiting.cancel()
            self._idle = self._backlog = None  # a cancelled wait does not answer the next call

    async def endless(self) -> None:
        """Awaits ``run``. StageError if it ends before this task is cancelled, for any reason."""
        try:
            await self.run()
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is not None and task.cancelling():  # not an inner task's cancellation
                raise
        raise StageError(self._name, "time sharing of its GPUs ended before the run did")

    async def _resume_hosts(self) -> None:
        """Wakes the hosts, and releases the lock if it is held."""
        await self._all("wake up", self._wake)
        self._idle = None  # that they were idle before they slept does not answer the next phase
        if self._asleep:
            self._asleep = False
            self.lock.release()

    async def _wait_until_due(self) -> None:
        """Waits for work of guests; then for a full backlog, or for idle hosts.

        The slower of the two waits stays alive and is awaited again in the next phase.
        """
        await self._guests.wait_for_work(self._name)
        self._backlog = self._backlog or asyncio.create_task(
            self._guests.wait_for_backlog(self._name)
        )
        self._idle = self._idle or asyncio.create_task(self._all_idle())
        await asyncio.wait({self._backlog, self._idle}, return_when=asyncio.FIRST_COMPLETED)
        if self._backlog.done():
            self._backlog.result()
            self._backlog = None

    async def _all_idle(self) -> None:
        """Returns when every host is idle; a host that died counts as idle."""
        idle = (host.idle() for host in self._hosts().values())
        await asyncio.gather(*idle, return_exceptions=True)

    async def _put_to_sleep(self, host: GpuHost) -> None:
        watchdog = ProgressWatchdog(self._name, self._timeout_s, KEY)
        await watchdog.within("going to sleep", host.sleep(), host.progress)

    async def _wake(self, host: GpuHost) -> None:
        remedy = f"raise {KEY} if an engine needs longer to wake up; otherwise it hangs"
        await Deadline(self._name).within(self._timeout_s, "waking up", host.wake(), remedy)

    async def _all(self, what: str, work: Callable[[GpuHost], Awaitable[None]]) -> None:
        """Awaits the work of all hosts; a StageError is left to the pool of the host that died."""
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
    """Several tasks hold ``lock`` together: from the first that enters to the last that leaves.

    Rebuilds of hosts use it: they exclude a scoring phase and a weight sync, but not each other.
    """

    def __init__(self, lock: GpuLock, what: str) -> None:
        self._lock = lock
        self._what = what
        self._entering = asyncio.Lock()
        self._inside = 0

    async def __aenter__(self) -> None:
        async with self._entering:
            if not self._inside:
                await self._lock.acquire(self._what)
            self._inside += 1

    async def __aexit__(self, *error: object) -> None:
        self._inside -= 1
        if not self._inside:
            self._lock.release()
