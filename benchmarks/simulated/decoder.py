"""A decoding engine as a clock: every running request gets one token per step.

The step takes ``speed.step(n)`` for n running requests, so the tokens that each of them has
received since the start is one number, and a request is a mark on it: it ends when the number has
grown by its length. One timer, for the nearest mark.
"""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import Callable
from dataclasses import dataclass, field

from async_opd.config.sections.plan import RolloutPlan
from async_opd.core.samples import VersionSpan


@dataclass
class Decoder:
    """Counts tokens; ``clock`` and ``timer`` are the event loop's unless a test brings others."""

    speed: RolloutPlan
    clock: Callable[[], float] = field(default_factory=lambda: asyncio.get_running_loop().time)
    timer: Callable[[float, Callable[[], None]], asyncio.TimerHandle] = field(
        default_factory=lambda: asyncio.get_running_loop().call_later
    )

    def __post_init__(self) -> None:
        self.running = 0
        self.paused = False
        self.request_s = 0.0  # the integral of running requests
        self._tokens = 0.0  # what each running request has received since the start
        self._since = self.clock()
        self._marks: list[tuple[float, int, asyncio.Future[float]]] = []
        self._count = 0
        self._handle: asyncio.TimerHandle | None = None
        self._versions: list[tuple[float, int]] = [(0.0, 0)]  # from which mark on, which version

    @property
    def tokens(self) -> float:
        """The tokens of a request that runs since the start."""
        self._advance()
        return self._tokens

    async def decode(self, length: int) -> tuple[VersionSpan, ...]:
        """Returns when ``length`` tokens are decoded, with the versions that produced them."""
        start = self.tokens
        self._count += 1
        done: asyncio.Future[float] = asyncio.get_running_loop().create_future()
        heapq.heappush(self._marks, (start + length, self._count, done))
        self.running += 1
        self._schedule()
        await done
        return self._spans(start, length)

    def pause(self) -> None:
        """No tokens from now on."""
        self._advance()
        self.paused = True
        self._schedule()

    def resume(self, version: int) -> None:
        """Tokens again, of weights ``version``."""
        self._advance()
        self._versions.append((self._tokens, version))
        self.paused = False
        self._schedule()

    @property
    def version(self) -> int:
        """The weights of the next token."""
        return self._versions[-1][1]

    def _advance(self) -> None:
        now = self.clock()
        if self.running and not self.paused:
            self._tokens += (now - self._since) / self.speed.step(self.running)
            self.request_s += (now - self._since) * self.running
        self._since = now

    def _schedule(self) -> None:
        if self._handle is not None:
            self._handle.cancel()
            self._handle = None
        if self._marks and not self.paused:
            left = max(0.0, self._marks[0][0] - self._tokens) * self.speed.step(self.running)
            self._handle = self.timer(left, self._finish)

    def _finish(self) -> None:
        self._advance()
        while self._marks and self._marks[0][0] <= self._tokens + 1e-9:
            _, _, done = heapq.heappop(self._marks)
            self.running -= 1
            if not done.done():
                done.set_result(self._tokens)
        self._schedule()

    def _spans(self, start: float, length: int) -> tuple[VersionSpan, ...]:
        """Token i of a request is decoded when the common count passes ``start + i``."""
        spans: list[VersionSpan] = []
        for index, (_, version) in enumerate(self._versions):
            last = index + 1 == len(self._versions)
            until = length if last else round(self._versions[index + 1][0] - start)
            begin = 0 if not spans else spans[-1].end
            end = min(max(until, begin), length)
            if end > begin:
                spans.append(VersionSpan(version, begin, end))
        return tuple(spans)
