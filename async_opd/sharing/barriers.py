"""A barrier whose last arrival does one piece of work: an engine on GPUs of several processes.

process 0 ──arrive──┐
process 1 ──arrive──┴──► the last one starts the engine ──► all of them go on
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Awaitable, Callable, Collection
from dataclasses import dataclass, field


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
