"""Waits that last as long as responses do: bounded by progress, not by the clock alone.

work ─────────────────────────────────────► its result
progress reports, polled ──no new token──► StageTimeout
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine, Mapping
from typing import Any, NoReturn, TypeVar

from async_opd.core.errors import AsyncOPDError, StageError, StageTimeout
from async_opd.core.reports import Progress
from async_opd.waiting.deadline import Deadline, Timer, gather_or_cancel, race

Result = TypeVar("Result")

PROBES_PER_TIMEOUT = 4
"""Progress reports that are asked for within the bound."""
MAX_RECOMPUTED = 2
"""How often a token may be computed: a request that an engine preempts begins anew."""
ANSWER_S = 20.0
"""Seconds for one of several to answer: a member that hangs does not hold up the others."""
MAX_NAMED = 8
"""Unresponsive members that an error names."""


def answer_s(quiet_s: float, depth: int = 1) -> float:
    """Seconds for each of several members to answer, so that all answer within one probe.

    ``depth`` 1: ``ProgressWatchdog`` asks them, with ``quiet_s``. 2: one of those members asks
    them, and needs the rest of its time to pass on the answers.
    """
    return min(ANSWER_S, quiet_s / PROBES_PER_TIMEOUT / 2) / depth


Ask = Callable[[], Coroutine[Any, Any, Progress]]


class ProgressWatchdog:
    """Ends waits of ``name`` after ``quiet_s`` seconds without a new token.

    ``key`` is the config key of ``quiet_s``. Tokens beyond ``MAX_RECOMPUTED`` times those that
    were to come are not progress: work that repeats itself without end is ended, too. So a wait
    takes at most these tokens at the speed at which they come, and ``quiet_s``; it takes up to
    twice ``quiet_s`` if the progress reports do not come in time.
    """

    def __init__(self, name: str, quiet_s: float, key: str, timer: Timer | None = None) -> None:
        self._name = name
        self._quiet_s = quiet_s
        self._key = key
        self._deadline = Deadline(name, timer)

    async def within(
        self, what: str, work: Awaitable[Result], ask: Ask, most: int | None = None
    ) -> Result:
        """The work's result. ``most`` tokens are to come; by default those of the first report.

        StageTimeout, and the work is cancelled, when it makes no progress.
        """
        return await race(work, self._wait_for_silence(what, ask, most))

    async def _wait_for_silence(self, what: str, ask: Ask, most: int | None) -> NoReturn:
        """Raises StageTimeout when no report of the last ``quiet_s`` seconds had a new token."""
        every = self._quiet_s / PROBES_PER_TIMEOUT
        quiet = probes = came = 0
        last: Progress | None = None
        unresponsive: tuple[str, ...] = ()
        while quiet < PROBES_PER_TIMEOUT:
            await self._deadline.pause(every)
            found = await self._asked(ask)
            probes, quiet = probes + 1, quiet + 1
            if isinstance(found, str):
                unresponsive = (found,)
                continue
            unresponsive = found.unresponsive
            if last is not None:
                new = max(0, found.tokens - last.tokens)
                most = last.most if most is None else most
                quiet = 0 if new and came + new <= MAX_RECOMPUTED * most else quiet
                came += new
            last = found
        names = "; ".join(unresponsive[:MAX_NAMED])
        raise StageTimeout(
            self._name,
            f"{what}: no new token for {self._quiet_s:g} s; {came} tokens came before, "
            f"{came / (probes * every):.3g} a second, of at most {most or 0}"
            + (f"; no answer to the last probe from {names}" if names else ""),
            f"raise {self._key} if tokens can be so far apart; otherwise it hangs",
        )

    async def _asked(self, ask: Ask) -> Progress | str:
        """The progress report, or the error in words if none came in time."""
        try:
            return await self._deadline.within(
                self._quiet_s / PROBES_PER_TIMEOUT, "a progress report", ask()
            )
        except (AsyncOPDError, OSError) as error:
            return _described(self._name, error)


class CombinedProgress:
    """The progress of several members as one: the sum of what each has computed between reports.

    A member that does not answer within ``answer_s`` adds nothing. The count of a member that was
    restarted begins at 0 again, and is not subtracted.
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
        """The progress of all members."""
        self._questions += 1
        number = self._questions
        found = await gather_or_cancel(
            *(self._one(name, ask, number) for name, ask in self.asks.items())
        )
        unresponsive = tuple(words for one in found for words in one.unresponsive)
        return Progress(self._tokens, sum(one.most for one in found), unresponsive)

    async def _one(self, name: str, ask: Ask, number: int) -> Progress:
        """The newest report of one member: a late answer to an earlier question is dropped."""
        deadline = Deadline(name, self._timer)
        try:
            now = await deadline.within(self._answer_s, "a progress report", ask())
        except (AsyncOPDError, OSError) as error:
            return Progress(0, 0, (_described(name, error),))
        newest, last = self._seen.get(name, (0, Progress(0)))
        if number < newest:
            return last
        self._seen[name] = number, now
        self._tokens += now.tokens - (last.tokens if now.tokens >= last.tokens else 0)
        return now


def _described(name: str, error: Exception) -> str:
    """The unresponsive member and its error, in one line."""
    cause = error.cause if isinstance(error, StageError) else f"{type(error).__name__}: {error}"
    return f"{name}: {' '.join(cause.split())}"
