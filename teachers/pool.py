"""A teacher's replicas as one: balanced, watched, mended.

    batch ──balancer──► replica.score ──► checked samples
                             └── fails: another replica; in the end each rollout alone

What becomes of a replica that fails is the affair of ``teachers.seats``.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

from async_opd.core.alarm import Timer
from async_opd.core.balancer import Place
from async_opd.core.batch import Batch
from async_opd.core.errors import NoReplica
from async_opd.core.payload import calls
from async_opd.core.reports import merge_reports
from async_opd.core.samples import Lost, Prompt, Rollout
from async_opd.core.stages import SamplingSpec, StageReport
from teachers.replicas import Rebuild, Replica, Weights
from teachers.seats import Health, Seat, Seats, in_words, scored, tokens_of

Result = TypeVar("Result")


@dataclass(frozen=True)
class Scored:
    """What became of a batch: samples, and rollouts that no replica could score."""

    samples: tuple[Batch, ...] = ()
    lost: tuple[Lost, ...] = ()


class TeacherPool:
    """Scores batches on whichever replica can. ``run`` mends replicas and never ends by itself."""

    def __init__(
        self,
        name: str,
        replicas: Sequence[Replica],
        health: Health,
        rebuild: Rebuild | None = None,
        *,
        tell: Callable[[str], None] = lambda text: None,
        asleep: bool = False,
        timer: Timer | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``asleep``: the replicas are, and work only between ``wake`` and ``sleep``.

        ``tell`` hears what becomes of replicas.
        """
        self._name = f"teacher {name}"
        self._health = health
        self._clock = clock
        self._seats = Seats(
            name, replicas, health, rebuild, tell=tell, asleep=asleep, timer=timer, clock=clock
        )
        self.balancer = self._seats.balancer
        self._totals = dict.fromkeys(("retries", "dead_letters"), 0.0)
        self._seconds: deque[float] = deque(maxlen=1024)

    @property
    def replicas(self) -> list[Replica]:
        """All of them, also those that do not serve."""
        return self._seats.replicas

    @property
    def tokens(self) -> int:
        """Of all calls to replicas that succeeded."""
        return self._seats.tokens

    async def run(self) -> None:
        """Mends replicas as they fail."""
        await self._seats.run()

    async def load(self, weights: Weights) -> None:
        """New weights for all replicas. One that does not take them is rebuilt, and takes them."""
        await self._seats.load(weights)

    async def wake(self) -> None:
        """The replicas have their GPUs; one that does not wake is mended, as any that fails."""
        await self._seats.wake()

    async def sleep(self) -> None:
        """Waits for what is being mended, then all replicas leave their GPUs."""
        await self._seats.sleep()

    async def rest(self) -> None:
        """Those that serve leave their GPUs, and nothing is mended any more."""
        await self._seats.rest()

    # ── work ───────────────────────────────────────────────────────────────────────────────────

    async def score(self, batch: Batch) -> Scored:
        """The samples, and the rollouts that no replica could score. Raises NoReplica.

        The first half of ``health.tries`` is made with the whole batch, the second with each of
        its rollouts alone, so that one of them cannot take the others with it.
        """
        return await self._score(batch, self._health.tries) if len(batch) else Scored()

    async def generate(self, prompts: Sequence[Prompt], sampling: SamplingSpec) -> list[Rollout]:
        """What the teacher itself answers, each call from one replica."""
        parts = calls(prompts, sampling)
        answers = await asyncio.gather(*(self._generate(part, sampling) for part in parts))
        return [rollout for answer in answers for rollout in answer]

    async def _generate(self, prompts: Sequence[Prompt], sampling: SamplingSpec) -> list[Rollout]:
        tokens = sum(len(p.token_ids) + sampling.n * sampling.max_tokens for p in prompts)
        outcome = await self._tries(
            self._health.tries,
            "generate",
            tokens,
            None,
            lambda r: r.generate(prompts, sampling),
            least_s=self._health.response_s(sampling.max_tokens),
        )
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    async def _score(self, batch: Batch, tries: int) -> Scored:
        whole = tries if len(batch) == 1 else math.ceil(tries / 2)
        work = partial(scored, self._name, batch)
        outcome = await self._tries(whole, "score", tokens_of(batch), _group(batch), work)
        if isinstance(outcome, Batch):
            self._seats.example = batch.split(1)[0]
            return Scored((outcome,))
        if len(batch) == 1:
            self._totals["dead_letters"] += 1
            reason = f"no replica could score it in {self._health.tries} tries: {in_words(outcome)}"
            return Scored(lost=(Lost(batch.headers[0], reason),))
        self._totals["retries"] += 1
        left = tries - whole
        found = await asyncio.gather(*(self._score(one, left) for one in _singles(batch)))
        return Scored(
            tuple(samples for part in found for samples in part.samples),
            tuple(lost for part in found for lost in part.lost),
        )

    async def _tries(
        self,
        tries: int,
        what: str,
        tokens: int,
        group: str | None,
        work: Callable[[Replica], Coroutine[Any, Any, Result]],
        least_s: float = 0.0,
    ) -> Result | Exception:
        """What the first replica that can makes of the work, or the last error."""
        failure: Exception | None = None
        for _ in range(tries):
            self._totals["retries"] += failure is not None
            place = await self._place(tokens, group)
            try:
                return await self._on_a_replica(place, what, work, least_s)
            except Exception as error:
                failure = error
        assert failure is not None
        return failure

    async def _place(self, tokens: int, group: str | None) -> Place[Seat]:
        try:
            return await self.balancer.take(tokens, group)
        except NoReplica as error:
            raise self._seats.all_gone() from error

    async def _on_a_replica(
        self,
        place: Place[Seat],
        what: str,
        work: Callable[[Replica], Coroutine[Any, Any, Result]],
        least_s: float = 0.0,
    ) -> Result:
        started = self._clock()
        result = await self._seats.call(place, what, work, least_s)
        self._seconds.append(self._clock() - started)
        place.replica.rebuilds = 0
        return result

    # ── what is going on ───────────────────────────────────────────────────────────────────────

    async def report(self) -> StageReport:
        """The replicas' reports as one, with the pool's own gauges. Totals are since the start.

        ``agreement`` is the mean over response tokens of log p(teacher) - log q(rollout), in nats,
        where the scores hold the sampled token's log-probability.
        """
        merged = merge_reports(await self._seats.reports())
        counters = dict(merged.counters)
        gap, gap_tokens = counters.pop("gap", 0.0), counters.pop("gap_tokens", 0.0)
        gauges = {**merged.gauges, **self._totals}
        gauges |= {"failures": self._seats.failures, "rebuilds": self._seats.rebuilds}
        if gap_tokens:
            gauges["agreement"] = gap / gap_tokens
        if self._seats.weights is not None:
            gauges["version"] = float(self._seats.weights.version)
        gauges["serving"] = float(self.balancer.serving)
        gauges["waiting"] = float(self.balancer.waiting)
        gauges["outstanding_tokens"] = float(sum(self.balancer.outstanding_tokens))
        seconds = sorted(self._seconds)
        for percent in (50, 99):
            if seconds:
                gauges[f"latency_p{percent}_s"] = seconds[(len(seconds) - 1) * percent // 100]
        waits = merged.waits_for if self.balancer.serving else "a replica that works"
        waits = "its turn" if self._seats.asleep else waits
        return replace(merged, counters=counters, gauges=gauges, waits_for=waits)


def _group(batch: Batch) -> str | None:
    """The prompt of rollouts that are all of one group: a replica may have it in its cache."""
    prompts = {header.uid.rpartition("/")[0] for header in batch.headers}
    return prompts.pop() if len(prompts) == 1 else None


def _singles(batch: Batch) -> list[Batch]:
    """Each item as a batch of its own."""
    singles = []
    while len(batch):
        one, batch = batch.split(1)
        singles.append(one)
    return singles
