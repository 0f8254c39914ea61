"""The trainer's turns on GPUs that rollout engines use at other times.

    work wants the GPUs ──► a turn: onload ── work, and work that follows it ── offload

``time_sharing`` gives a turn while the engines sleep. A turn ends when the trainer has had no work
for ``linger_s``: it waits for samples that the engines are to make, or for a weight sync, which
needs them awake. The trainer's turn ends with each wait, so that no wait lasts for ever.
``linger_s`` is the time in which the driver calls the next step, snapshot or capture.

Engines on the GPUs of several ranks start at a barrier, whose last arrival does the work:

process 0 ──arrive──┐
process 1 ──arrive──┴──► the last one starts the engine ──► all of them go on
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Awaitable, Callable, Collection
from dataclasses import dataclass, field

from async_opd.core.stages import TRAINER
from async_opd.waiting.deadline import Cancellable, Deadline, Timer, loop_timer

LINGER_S = 0.25
"""Seconds: many times those of a call, few beside those in which engines finish their requests."""

Move = Callable[[], Awaitable[None]]


class GpuTurns:
    """``async with`` it around work on the GPUs: entering waits for a turn.

    The error of a turn is that of all work that waits or comes later: it is not known what moved.
    """

    def __init__(self, linger_s: float = LINGER_S, timer: Timer | None = None) -> None:
        self._linger_s = linger_s
        self._deadline = Deadline(TRAINER, timer)
        self._users = self._entered = 0  # work that waits or is under way; all work so far
        self._wanted, self._unwanted = asyncio.Event(), asyncio.Event()
        self._unwanted.set()
        self._given = asyncio.Event()
        self._turn = asyncio.Lock()
        self._fault: Exception | None = None
        self._timer = timer or loop_timer
        self._holds: list[Cancellable] = []

    async def __aenter__(self) -> None:
        self._users += 1
        self._entered += 1
        self._wanted.set()
        self._unwanted.clear()
        try:
            await self._given.wait()
            if self._fault is not None:
                raise self._fault
        except BaseException:
            self._leave()
            raise

    async def __aexit__(self, *error: object) -> None:
        self._leave()

    def _leave(self) -> None:
        self._users -= 1
        if not self._users:
            self._wanted.clear()
            self._unwanted.set()

    async def hold(self, at_most_s: float) -> None:
        """Returns in a turn, which lasts until ``release``, but not longer than ``at_most_s``."""
        await self.__aenter__()
        self._holds.append(self._timer(at_most_s, self.release))

    def release(self) -> None:
        """Ends every ``hold``."""
        holds, self._holds = self._holds, []
        for hold in holds:
            hold.cancel()
            self._leave()

    async def wanted(self) -> None:
        """Returns when some work waits for a turn, or has one."""
        await self._wanted.wait()

    async def over(self) -> None:
        """Returns when no turn is under way: one outlives the caller of ``take``."""
        async with self._turn:
            pass

    async def take(self, onload: Move, offload: Move) -> None:
        """One turn, between ``onload`` and ``offload``; none if no work waits for it.

        It goes on if the caller is cancelled: work may be under way.
        """
        turn = asyncio.create_task(self._take(onload, offload))
        turn.add_done_callback(lambda _: turn.cancelled() or turn.exception())  # work raises it
        await asyncio.shield(turn)

    async def _take(self, onload: Move, offload: Move) -> None:
        async with self._turn:
            if not self._users:
                return
            try:
                if self._fault is not None:
                    raise self._fault
                await onload()
                self._given.set()
                await self._end()
                self._given.clear()
                await offload()
            except Exception as error:
                self._fault = error
                self._given.set()
                raise

    async def _end(self) -> None:
        """Returns when no work is left, and none has come for ``linger_s``."""
        entered = -1
        while self._users or entered != self._entered:
            await self._unwanted.wait()
            entered = self._entered
            await self._deadline.pause(self._linger_s)


@dataclass
class Barrier:
    """The participants that have arrived; whether the work has ended, and its error if any."""

    arrived: set[int] = field(default_factory=set)
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    error: BaseException | None = None


class Barriers:
    """Barriers by name. Participants that share several must arrive at them in the same order.

    A participant waits for the others until its caller cancels it: a caller whose participant
    fails before it arrives has to cancel the others, as a TaskGroup does.
    """

    def __init__(self) -> None:
        self._barriers: defaultdict[tuple[str, int], Barrier] = defaultdict(Barrier)

    async def arrive(
        self,
        name: tuple[str, int],
        participant: int,
        expected: Collection[int],
        work: Callable[[], Awaitable[None]],
    ) -> None:
        """Returns when all ``expected`` participants have arrived and the last one's work is done.

        Raises the error of that work at every participant.
        """
        barrier = self._barriers[name]
        barrier.arrived.add(participant)
        if barrier.arrived >= set(expected):
            try:
                await work()
            except BaseException as error:
                barrier.error = error
                raise
            finally:
                barrier.ended.set()
        await barrier.ended.wait()
        if barrier.error is not None:
            raise barrier.error
