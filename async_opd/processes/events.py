"""One stream of events: the states of members, and the messages of a stage for run.log."""

from __future__ import annotations

import asyncio
import enum
from collections import deque
from dataclasses import dataclass
from secrets import randbits

from async_opd.core.errors import StageError
from async_opd.core.reports import Events


class State(enum.Enum):
    """See the picture in ``async_opd.processes.members``."""

    SERVING = enum.auto()
    EJECTED = enum.auto()
    ABSENT = enum.auto()
    REBUILDING = enum.auto()
    GONE = enum.auto()


@dataclass(frozen=True)
class Event:
    """One arrow of the picture, of one member.

    ``incarnation`` is the member's after the event. ``cause`` is the failure that led to it, if any
    did; ``delay_s`` are the seconds before the rebuild that an event to REBUILDING announces, and
    ``took_s`` those that the last start of the member took.
    """

    member: str
    incarnation: int
    before: State
    after: State
    cause: str = ""
    delay_s: float = 0.0
    took_s: float | None = None

    def __str__(self) -> str:
        """The message of ``run.log``."""
        soon = f" in {self.delay_s:g} s" if self.delay_s else ""
        if self.took_s is not None:
            soon += f" (its last start took {self.took_s:.0f} s)"
        after = f", after: {self.cause}" if self.cause else ""
        words = {
            (State.SERVING, State.EJECTED): f"is ejected: {self.cause}",
            (State.EJECTED, State.SERVING): "serves again",
            (State.EJECTED, State.ABSENT): f"has left its place: {self.cause}",
            (State.REBUILDING, State.ABSENT): f"has left its place: {self.cause}",
            (State.ABSENT, State.REBUILDING): "has a place in the cluster, and is being started",
            (State.EJECTED, State.REBUILDING): f"is being rebuilt{soon}{after}",
            (State.REBUILDING, State.REBUILDING): f"is being rebuilt{soon}{after}",
            (State.REBUILDING, State.SERVING): "is rebuilt",
        }
        last = f"is gone for good: {self.cause}" if self.after is State.GONE else "is replaced"
        return f"{self.member} {words.get((self.before, self.after), last)}"


def one_line(error: Exception) -> str:
    """An error in one line."""
    kind = "" if isinstance(error, StageError) else f"{type(error).__name__}: "
    return " ".join(f"{kind}{error}".split())[:500]


class EventLog:
    """A stage's messages for run.log, kept until their one reader, the driver, has read them.

    The reader says up to which number it has read: a lost answer loses no line.

    Numbers begin at a random one: a reader of another process's lines has read none of these.
    """

    def __init__(self) -> None:
        self._lines: deque[str] = deque()
        self._first = self._next = randbits(62)  # the clock of a dead process may have been ahead
        self._appended = asyncio.Event()

    def append(self, line: str) -> None:
        """Adds a line."""
        self._lines.append(line)
        self._next += 1
        self._appended.set()

    async def after(self, seen: int, wait: bool = True) -> Events:
        """Every line from number ``seen`` on; those before are forgotten."""
        if self._first <= seen <= self._next:
            while self._lines and self._next - len(self._lines) < seen:
                self._lines.popleft()
        while wait and not self._lines:
            self._appended.clear()
            await self._appended.wait()
        return Events(self._next, tuple(self._lines))
