"""Waits that last as long as responses do: bounded by signs of life, not by the clock alone.

work ────────────────────────────────────────► its result
tokens, asked for again and again ──none new──► StageTimeout
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from typing import Any, NoReturn, TypeVar

from async_opd.core.deadline import Deadline, Timer
from async_opd.core.errors import AsyncOPDError, StageError, StageTimeout
from async_opd.core.race import race

Result = TypeVar("Result")

PROBES_PER_TIMEOUT = 4
"""Signs of life that are asked for within the bound."""
MAX_RECOMPUTED = 2
"""Times that a token may be computed: a request that an engine preempts begins again."""


@dataclass(frozen=True)
class Progress:
    """``tokens`` computed since some moment; only differences mean anything.

    ``most`` is what may still come of what is under way now: prompts and ``max_tokens``.
    ``silent`` are those who did not answer, each with its error.
    """

    tokens: int
    most: int = 0
    silent: tuple[str, ...] = field(default=(), compare=False)


ANSWER_S = 20.0
"""Of several, one that does not answer in time does not hold up the others' answers."""
MAX_NAMED = 8
"""Of those who did not answer, in an error."""


def answer_s(quiet_s: float, depth: int = 1) -> float:
    """Seconds for each of several to answer, so that all together answer within a look.

    ``depth`` 1: they are asked by ``ProgressWatchdog``, with ``quiet_s``. 2: by one of those,
    which needs the time to say what the others of its own have answered.
    """
    return min(ANSWER_S, quiet_s / PROBES_PER_TIMEOUT / 2) / depth


Ask = Callable[[], Coroutine[Any, Any, Progress]]


class ProgressWatchdog:
    """Of ``name``, for ``quiet_s`` seconds without any new token; ``key`` sets them in the config.

    Tokens beyond ``MAX_RECOMPUTED`` times those that were to come are no sign of life: what goes
    round in circles ends, too. So a wait takes at most these tokens at the speed at which they
    come, and ``quiet_s``; to notice may take as long again, where who is asked does not answer.
    """

    def __init__(self, name: str, quiet_s: float, key: str, timer: Timer | None = None) -> None:
        self._name = name
        self._quiet_s = quiet_s
        self._key = key
        self._deadline = Deadline(name, timer)

    async def within(
        self, what: str, work: Awaitable[Result], ask: Ask, most: int | None = None
    ) -> Result:
        """The work's result. ``most`` tokens are to come; by default as the first answer says."""
        return await race(work, self._wait_for_silence(what, ask, most))

    async def _wait_for_silence(self, what: str, ask: Ask, most: int | None) -> NoReturn:
        """Raises when there was no sign of life for too long."""
        every = self._quiet_s / PROBES_PER_TIMEOUT
        quiet = looks = came = 0
        last: Progress | None = None
        silent: tuple[str, ...] = ()
        while quiet < PROBES_PER_TIMEOUT:
            await self._deadline.pause(every)
            found = await self._asked(ask)
            looks, quiet = looks + 1, quiet + 1
            if isinstance(found, str):
                silent = (found,)
                continue
            silent = found.silent
            if last is not None:
                new = max(0, found.tokens - last.tokens)
                most = last.most if most is None else most
                quiet = 0 if new and came + new <= MAX_RECOMPUTED * most else quiet
                came += new
            last = found
        raise StageTimeout(
            self._name,
            f"{what}: no sign of life for {self._quiet_s:g} s; {came} tokens came before, "
            f"{came / (looks * every):.3g} a second, of at most {most or 0}"
            + (f"; at last no answer from {'; '.join(silent[:MAX_NAMED])}" if silent else ""),
            f"raise {self._key} if tokens can be so far apart; otherwise it hangs",
        )

    async def _asked(self, ask: Ask) -> Progress | str:
        """Words where who is asked does not answer, or has failed: that is no sign of life."""
        try:
            return await self._deadline.within(
                self._quiet_s / PROBES_PER_TIMEOUT, "a sign of life", ask()
            )
        except (AsyncOPDError, OSError) as error:
            return _words(self._name, error)


class CombinedProgress:
    """The progress of several as one: what each has come further since it was asked before.

    Who does not answer within ``answer_s`` has come no further. One that was restarted begins at 0.
    """

    def __init__(
        self, asks: Mapping[str, Ask], answer_s: float = ANSWER_S, timer: Timer | None = None
    ) -> None:
        self.asks = dict(asks)
        self._answer_s = answer_s
        self._timer = timer
        self._questions = 0
        self._seen: dict[str, tuple[int, Progress]] = {}
        self._tokens = 0

    async def __call__(self) -> Progress:
        """Of all of them."""
        self._questions += 1
        number = self._questions
        found = await asyncio.gather(
            *(self._one(name, ask, number) for name, ask in self.asks.items())
        )
        silent = tuple(words for one in found for words in one.silent)
        return Progress(self._tokens, sum(one.most for one in found), silent)

    async def _one(self, name: str, ask: Ask, number: int) -> Progress:
        """The newest of one: an answer to a question before that of the newest says nothing."""
        deadline = Deadline(name, self._timer)
        try:
            now = await deadline.within(self._answer_s, "a sign of life", ask())
        except (AsyncOPDError, OSError) as error:
            return Progress(0, 0, (_words(name, error),))
        newest, last = self._seen.get(name, (0, Progress(0)))
        if number < newest:
            return last
        self._seen[name] = number, now
        self._tokens += now.tokens - (last.tokens if now.tokens >= last.tokens else 0)
        return now


def _words(name: str, error: Exception) -> str:
    """Who did not answer, and why, in one line."""
    cause = error.cause if isinstance(error, StageError) else f"{type(error).__name__}: {error}"
    return f"{name}: {' '.join(cause.split())}"
