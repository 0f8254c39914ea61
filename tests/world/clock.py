"""Time for tests: it passes when they say so, or as turns of the event loop."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Coroutine
from typing import Any


class ManualTimer:
    """A timer whose time is moved by hand; ``delays`` is all that it was asked for."""

    def __init__(self) -> None:
        self.now = 0.0
        self.due: list[list[Any]] = []
        self.delays: list[float] = []

    def __call__(self, delay: float, call: Callable[[], None]) -> Any:
        due = self.due
        entry = [self.now + delay, call]
        self.due.append(entry)
        self.delays.append(delay)

        class Handle:
            def cancel(self) -> None:
                if entry in due:
                    due.remove(entry)

        return Handle()

    def advance(self, seconds: float) -> None:
        self.now += seconds
        for entry in [e for e in self.due if e[0] <= self.now]:
            if entry in self.due:
                self.due.remove(entry)
                entry[1]()

    async def passes(self, seconds: float) -> None:
        """So much time passes, and everything that follows from it happens."""
        self.advance(seconds)
        await settle()

    @property
    def left(self) -> list[float]:
        """Seconds until each timer that is set rings."""
        return [when - self.now for when, _ in self.due]

    def clock(self) -> float:
        """The time now."""
        return self.now


async def settle(turns: int = 60) -> None:
    """Lets all other tasks go on."""
    for _ in range(turns):
        await asyncio.sleep(0)


class Pace:
    """Lets other tasks run a random number of times: speeds of the stages, without time."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    async def wait(self) -> None:
        await settle(self._random.randint(0, 12))


class Straggling(Pace):
    """Most work takes a moment; now and then some takes longer than several weight versions."""

    async def wait(self) -> None:
        long = self._random.random() < 0.1
        await settle(self._random.randint(0, 400 if long else 6))


class PacedReads:
    """Prompts are read after a while and returned after a while, by no thread."""

    def __init__(self, pace: Pace) -> None:
        self.pace = pace

    async def run(self, work: Callable[[], Any]) -> Any:
        await self.pace.wait()
        found = work()
        await self.pace.wait()
        return found


class VirtualLoop(asyncio.SelectorEventLoop):
    """Its clock jumps to the next timer whenever nothing is left to do now.

    A run of an hour takes seconds, and does not depend on the machine. Work of threads is done at
    once.
    """

    def __init__(self) -> None:
        self._virtual = 0.0
        super().__init__()

    def time(self) -> float:
        return self._virtual

    def _run_once(self) -> None:
        ready: Any = self._ready  # type: ignore[attr-defined]
        timers: Any = self._scheduled  # type: ignore[attr-defined]
        if not ready and timers:
            self._virtual = max(self._virtual, timers[0]._when)
        super()._run_once()  # type: ignore[misc]

    def run_in_executor(self, executor: Any, func: Callable[..., Any], *args: Any) -> Any:
        done = self.create_future()
        try:
            done.set_result(func(*args))
        except Exception as error:
            done.set_exception(error)
        return done


def run_virtually(work: Coroutine[Any, Any, Any]) -> Any:
    """Runs it to its end."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(work)
