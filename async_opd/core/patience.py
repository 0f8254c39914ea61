"""Waits that last as long as responses do: bounded by signs of life, not by the clock alone.

work ────────────────────────────────────────► its result
tokens, asked for again and again ──none new──► StageTimeout
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from async_opd.core.alarm import Alarm, Timer
from async_opd.core.errors import AsyncOPDError, StageTimeout

Result = TypeVar("Result")

LOOKS = 4
"""Signs of life that are asked for within the bound."""
AGAIN = 2
"""Times that a token may be computed: a request that an engine preempts begins again."""


@dataclass(frozen=True)
class Progress:
    """``tokens`` computed since some moment; only differences mean anything.

    ``most`` is what may still come of what is under way now: prompts and ``max_tokens``.
    """

    tokens: int
    most: int = 0


ANSWER_S = 10.0
"""Of several, one that does not answer in time does not hold up the others' answers."""

Ask = Callable[[], Coroutine[Any, Any, Progress]]


class Patience:
    """Of ``name``, for ``quiet_s`` seconds without any new token; ``key`` sets them in the config.

    Tokens beyond ``AGAIN`` times those that were to come are no sign of life: what goes round in
    circles ends, too. So a wait takes at most these tokens at the speed at which they come, and
    ``quiet_s``; to notice may take as long again, where who is asked does not answer.
    """

    def __init__(self, name: str, quiet_s: float, key: str, timer: Timer | None = None) -> None:
        self._name = name
        self._quiet_s = quiet_s
        self._key = key
        self._alarm = Alarm(name, timer)

    async def within(
        self, what: str, work: Awaitable[Result], ask: Ask, most: int | None = None
    ) -> Result:
        """The work's result. ``most`` tokens are to come; by default as the first answer says."""
        task = asyncio.ensure_future(work)
        watch = asyncio.ensure_future(self._silence(what, ask, most))
        try:
            await asyncio.wait({task, watch}, return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                return task.result()
            raise watch.result()
        finally:
            task.cancel()
            watch.cancel()

    async def _silence(self, what: str, ask: Ask, most: int | None) -> StageTimeout:
        """Returns when there was no sign of life for too long."""
        every = self._quiet_s / LOOKS
        quiet = looks = came = 0
        last: Progress | None = None
        while quiet < LOOKS:
            await self._alarm.pause(every)
            found = await self._asked(ask)
            looks, quiet = looks + 1, quiet + 1
            if found is None:
                continue
            if last is not None:
                new = max(0, found.tokens - last.tokens)
                most = last.most if most is None else most
                quiet = 0 if new and came + new <= AGAIN * most else quiet
                came += new
            last = found
        return StageTimeout(
            self._name,
            f"{what}: no sign of life for {self._quiet_s:g} s; {came} tokens came before, "
            f"{came / (looks * every):.3g} a second, of at most {most or 0}",
            f"raise {self._key} if tokens can be so far apart; otherwise it hangs",
        )

    async def _asked(self, ask: Ask) -> Progress | None:
        """None where who is asked does not answer, or has failed: that is no sign of life."""
        try:
            return await self._alarm.within(self._quiet_s / LOOKS, "a sign of life", ask())
        except (AsyncOPDError, OSError):
            return None


class Several:
    """The progress of several as one: what each has come further since it was asked before.

    Who does not answer within ``ANSWER_S`` has come no further. One that was restarted begins at 0.
    """

    def __init__(self, asks: Mapping[str, Ask]) -> None:
        self.asks = dict(asks)
        self._seen: dict[str, Progress] = {}
        self._tokens = 0

    async def __call__(self) -> Progress:
        """Of all of them."""
        found = await asyncio.gather(*(self._one(name, ask) for name, ask in self.asks.items()))
        return Progress(self._tokens, sum(found))

    async def _one(self, name: str, ask: Ask) -> int:
        try:
            async with asyncio.timeout(ANSWER_S):
                now = await ask()
        except (AsyncOPDError, OSError):
            return 0
        before, self._seen[name] = self._seen.get(name, Progress(0)).tokens, now
        self._tokens += now.tokens - (before if now.tokens >= before else 0)
        return now.most
