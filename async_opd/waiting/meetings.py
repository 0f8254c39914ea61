"""Something that is done once, when all that it needs have come: an engine on several hosts' GPUs.

host 0 ──came──┐
host 1 ──came──┴──► the last to come starts the engine ──► all go on
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Awaitable, Callable, Collection
from dataclasses import dataclass, field


@dataclass
class Meeting:
    """Who has come; when it is over, with which error if any."""

    came: set[int] = field(default_factory=set)
    over: asyncio.Event = field(default_factory=asyncio.Event)
    error: BaseException | None = None


class Meetings:
    """Meetings by name. There is no deadlock if everybody goes to its meetings in the same order.

    A meeting to which somebody never comes lasts until its caller is cancelled: whoever fails
    before has to cancel the others, as a TaskGroup does.
    """

    def __init__(self) -> None:
        self._meetings: defaultdict[tuple[str, int], Meeting] = defaultdict(Meeting)

    async def attend(
        self,
        name: tuple[str, int],
        who: int,
        all_of: Collection[int],
        work: Callable[[], Awaitable[None]],
    ) -> None:
        """Returns when all have come and the work of the last one is done. Raises its error."""
        meeting = self._meetings[name]
        meeting.came.add(who)
        if meeting.came >= set(all_of):
            try:
                await work()
            except BaseException as error:
                meeting.error = error
                raise
            finally:
                meeting.over.set()
        await meeting.over.wait()
        if meeting.error is not None:
            raise meeting.error
