"""A teacher's replicas as one pool: the balancer spreads the calls, and failed calls are repeated.

    batch ──balancer──► replica.score ──► checked samples
                             └── fails: another replica; in the end each rollout alone

``teachers.replica_slots`` ejects and rebuilds replicas that fail.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

from async_opd.core.batch import Batch
from async_opd.core.errors import RolloutFault
from async_opd.core.reports import StageReport
from async_opd.core.samples import DeadLetter, Prompt, Rollout
from async_opd.core.stages import SamplingSpec
from async_opd.core.uid import prompt_uid
from async_opd.observability.metering import merge_reports
from async_opd.processes.events import one_line
from async_opd.queue.sizes import EpisodeBounds, calls
from async_opd.waiting.deadline import gather_or_cancel
from teachers.replica_slots import IN_FLIGHT, ReplicaSlots, ScoringReplica, score_checked, tokens_of

Result = TypeVar("Result")


@dataclass(frozen=True)
class ScoreResult:
    """The samples of a batch, and its rollouts that no replica could score."""

    samples: tuple[Batch, ...] = ()
    lost: tuple[DeadLetter, ...] = ()


class TeacherPool:
    """Scores batches on the replicas of one teacher."""

    def __init__(self, slots: ReplicaSlots, episodes: EpisodeBounds | None = None) -> None:
        """``episodes``: the bounds of the teacher's own answers, if they are episodes."""
        self.slots, self._episodes = slots, episodes
        self.balancer = slots.balancer
        self._name = slots.name
        self._health = slots.health
        self._clock = slots.clock
        self._totals = dict.fromkeys(("retries", "dead_letters"), 0.0)
        self._seconds: deque[float] = deque(maxlen=1024)

    # ── work ───────────────────────────────────────────────────────────────────────────────────

    async def score(self, batch: Batch) -> ScoreResult:
        """The samples, and the rollouts that no replica could score. Raises NoReplica.

        The first half of ``health.tries`` uses the whole batch, the second each of its rollouts
        alone, so that a rollout that no replica can score does not fail the others.
        """
        return await self._score(batch, self._health.tries) if len(batch) else ScoreResult()

    async def generate(self, prompts: Sequence[Prompt], sampling: SamplingSpec) -> list[Rollout]:
        """The teacher's own answers, each call from one replica."""
        parts = calls(prompts, sampling, self._episodes)
        answers = await gather_or_cancel(*(self._generate(part, sampling) for part in parts))
        return [rollout for answer in answers for rollout in answer]

    async def _generate(self, prompts: Sequence[Prompt], sampling: SamplingSpec) -> list[Rollout]:
        longest, playing_s, played = sampling.max_tokens, 0.0, self._episodes
        if played is not None:
            longest = max(longest, played.tokens)
            answers = IN_FLIGHT * len(prompts) * sampling.n  # another call may have begun before
            playing_s = math.ceil(answers / played.concurrency) * played.seconds
        tokens = sum(len(p.token_ids) + sampling.n * longest for p in prompts)
        outcome = await self._tries(
            self._health.tries,
            "generate",
            tokens,
            None,
            partial(_result_or_fault, lambda r: r.generate(prompts, sampling)),
            least_s=self._health.response_s(sampling.max_tokens),
            playing_s=playing_s,
        )
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    async def _score(self, batch: Batch, tries: int) -> ScoreResult:
        whole = tries if len(batch) == 1 else math.ceil(tries / 2)
        work = partial(_result_or_fault, partial(score_checked, self._name, batch))
        outcome = await self._tries(whole, "score", tokens_of(batch), _group(batch), work)
        if isinstance(outcome, Batch):
            self.slots.probe_batch = batch.split(1)[0]
            return ScoreResult((outcome,))
        if len(batch) == 1:
            self._totals["dead_letters"] += 1
            reason = f"no replica could score it in {self._health.tries} tries: {one_line(outcome)}"
            if isinstance(outcome, RolloutFault):
                reason = outcome.cause
            return ScoreResult(lost=(DeadLetter(batch.headers[0], reason),))
        self._totals["retries"] += 1
        left = tries - whole
        singles = (parts[0] for parts in Batch.messages([batch], most=1))  # one rollout each
        found = await gather_or_cancel(*(self._score(one, left) for one in singles))
        return ScoreResult(
            tuple(samples for part in found for samples in part.samples),
            tuple(lost for part in found for lost in part.lost),
        )

    async def _tries(
        self,
        tries: int,
        what: str,
        tokens: int,
        group: str | None,
        work: Callable[[ScoringReplica], Coroutine[Any, Any, Result]],
        least_s: float = 0.0,
        playing_s: float = 0.0,
    ) -> Result | Exception:
        """The first result of the work on the replicas, or the error of the last try."""
        failure: Exception | None = None
        for _ in range(tries):
            self._totals["retries"] += failure is not None
            reservation = await self.balancer.reserve(tokens, group)
            started = self._clock()
            try:
                result = await self.slots.call(reservation, what, work, least_s, playing_s)
            except Exception as error:
                failure = error
            else:
                self._seconds.append(self._clock() - started)
                return result
        assert failure is not None
        return failure

    # ── measurements ───────────────────────────────────────────────────────────────────────────

    async def report(self) -> StageReport:
        """The replicas' reports as one, with the pool's own gauges. Totals are since the start.

        ``agreement`` is the mean over response tokens of log p(teacher) - log q(rollout), in nats,
        where the scores hold the sampled token's log-probability.
        """
        merged = merge_reports(await self.slots.reports())
        counters = dict(merged.counters)
        gap, gap_tokens = counters.pop("gap", 0.0), counters.pop("gap_tokens", 0.0)
        members = self.slots.members
        gauges = {
            **merged.gauges,
            **self._totals,
            "failures": float(members.failures),
            "rebuilds": float(members.rebuilds),
            "serving": float(len(members.serving)),
            "waiting": float(self.balancer.waiting),
            "outstanding_tokens": float(sum(self.balancer.outstanding_tokens)),
        }
        if gap_tokens:
            gauges["agreement"] = gap / gap_tokens
        if self.slots.weights is not None:
            gauges["version"] = float(self.slots.weights.version)
        seconds = sorted(self._seconds)
        for percent in (50, 99):
            if seconds:
                gauges[f"latency_p{percent}_s"] = seconds[(len(seconds) - 1) * percent // 100]
        waits = merged.waits_for if len(members.serving) else "a replica that serves"
        waits = "its scoring phase" if self.slots.asleep else waits
        return replace(merged, counters=counters, gauges=gauges, waits_for=waits)


async def _result_or_fault(
    work: Callable[[ScoringReplica], Coroutine[Any, Any, Result]], replica: ScoringReplica
) -> Result | RolloutFault:
    """The fault of a rollout or prompt is a result: no replica is at fault, none does better."""
    try:
        return await work(replica)
    except RolloutFault as fault:
        return fault


def _group(batch: Batch) -> str | None:
    """The prompt's uid if all rollouts are of one group: a replica may have cached the prompt."""
    prompts = {prompt_uid(header.uid) for header in batch.headers}
    return prompts.pop() if len(prompts) == 1 else None
