"""Simulates a whole run in virtual time.

    SimulatedRollouts ──► SimulatedTopic rollouts/<teacher> ──► SimulatedScoring ──► SimulatedTopic
    scored ──► SimulatedTraining
        ▲                                                                     │
        └────────────────────── version, budget (Admission) ──────────────────┘

The rules are the pipeline's, admission is the real class, and samples are numbers instead of
messages. There is one event per finished rollout, scored batch and step.
A ``Prediction`` has rates, shares of time, staleness and queues.

One teacher's replicas are simulated as ``teachers.stage`` drives them, without engines:

topic rollouts/<teacher> ──lease of what is there──► fewest outstanding tokens ──► topic scored
"""

from __future__ import annotations

import heapq
from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import count

from async_opd.accounting.admission import Admission
from async_opd.core.errors import ConfigError
from async_opd.core.stages import PROMPTS, SCORED, rollouts_topic
from async_opd.tools.plan.setting import Setting, TeacherPoolSpec, warmup_versions
from async_opd.tools.plan.sim.clock import Clock, Level, SimulatedTopic
from async_opd.tools.plan.sim.population import Population
from async_opd.tools.plan.sim.rollouter import SimulatedRollouts
from async_opd.tools.plan.sim.trainer import SimulatedTraining
from teachers.replica_slots import IN_FLIGHT

Work = tuple[list[int], int]
"""A batch of samples and its tokens."""


class SimulatedBalancer:
    """Reservations on replicas. Of replicas with equal tokens the one changed first is taken."""

    def __init__(self, replicas: int, capacity: int) -> None:
        """Each of ``replicas`` has at most ``capacity`` reservations at a time."""
        self.free = replicas * capacity
        """Reservations that are free."""
        self._capacity = capacity
        self._tokens = [0] * replicas
        self._taken = [0] * replicas
        self._turns = list(range(replicas))  # the turn of each replica's one valid entry
        self._next_turn = count(replicas)
        self._order = [(0, turn, turn) for turn in range(replicas)]  # (tokens, turn, replica)

    def take(self, tokens: int) -> int:
        """Reserves the replica with the fewest outstanding tokens; one must be free."""
        while True:
            _, turn, replica = heapq.heappop(self._order)
            if turn == self._turns[replica]:
                self._change(replica, 1, tokens)
                return replica

    def give_back(self, replica: int, tokens: int) -> None:
        """Ends a reservation."""
        self._change(replica, -1, -tokens)

    def _change(self, replica: int, reservations: int, tokens: int) -> None:
        self._taken[replica] += reservations
        self._tokens[replica] += tokens
        self.free -= reservations
        self._turns[replica] = turn = next(self._next_turn)
        if self._taken[replica] < self._capacity:
            heapq.heappush(self._order, (self._tokens[replica], turn, replica))


class SimulatedScoring:
    """``IN_FLIGHT`` loops per replica with one batch each; a replica scores one batch at a time."""

    def __init__(
        self,
        pool: TeacherPoolSpec,
        prompt_tokens: float,
        clock: Clock,
        population: Population,
        rollouts: SimulatedTopic[int],
        scored: SimulatedTopic[int],
    ) -> None:
        self.working = Level(clock)
        """Replicas that score."""
        self.blocked = Level(clock)
        """Scored samples that wait for room in the queue."""
        self.batches = 0
        """Batches scored so far."""
        self._pool = pool
        self._prompt_tokens = prompt_tokens
        self._clock = clock
        self._population = population
        self._rollouts = rollouts
        self._scored = scored
        self._balance = SimulatedBalancer(pool.replicas, IN_FLIGHT)
        self._work: list[deque[Work]] = [deque() for _ in range(pool.replicas)]

    def start(self) -> None:
        """Lets every loop ask for rollouts."""
        for _ in range(IN_FLIGHT * self._pool.replicas):
            self._next()

    def _next(self) -> None:
        self._rollouts.get(1, self._pool.batch, self._got)

    def _got(self, samples: list[int]) -> None:
        lengths = self._population.lengths
        response = sum(lengths[sample] for sample in samples)
        tokens = response + round(len(samples) * self._prompt_tokens)
        replica = self._balance.take(tokens)
        self._work[replica].append((samples, tokens))
        if len(self._work[replica]) == 1:
            self._begin(replica)

    def _begin(self, replica: int) -> None:
        self.working.add(1)
        _, tokens = self._work[replica][0]
        self._clock.after(self._pool.speed.seconds(tokens), self._end, replica)

    def _end(self, replica: int) -> None:
        self.working.add(-1)
        samples, tokens = self._work[replica].popleft()
        self._balance.give_back(replica, tokens)
        self.batches += 1
        if self._work[replica]:
            self._begin(replica)
        self.blocked.add(len(samples))

        def put() -> None:
            self.blocked.add(-len(samples))
            self._rollouts.ack(len(samples))
            self._clock.after(self._pool.speed.turnaround_s, self._next)

        self._scored.put(samples, put)


MAX_SAMPLES = 400_000
"""Samples of a simulated run; the rest of a longer one is extrapolated."""
MOST_SAMPLES = 5 * MAX_SAMPLES
"""Samples until the rates of a setting are steady: more are refused, each takes time and memory."""


@dataclass(frozen=True)
class PoolUse:
    """How a pool spends its time.

    ``busy`` is the share of time in which a replica has work, the mean over replicas, as a run's
    metric ``busy_s`` measures it. ``used`` is the pool's throughput as a share of its ``limit``,
    which is its own limit in samples per second. ``waits`` are the shares of the remaining time by
    what the pool waits for, the largest first.
    """

    name: str
    replicas: int
    busy: float
    used: float
    limit: float
    waits: Mapping[str, float]

    @property
    def waits_for(self) -> str:
        """The pool's longest wait; '' if that is less than 1 % of the time."""
        reason = next(iter(self.waits), "")
        return reason if reason and self.waits[reason] >= 0.01 else ""


@dataclass(frozen=True)
class Prediction:
    """Rates and shares after the warm-up; ``seconds`` is the time of the whole training.

    ``wall_s`` includes the time before the first and after the last step. ``staleness[v]`` is the
    share of samples with staleness v, ``queues[topic]`` the topic's mean number of ready samples.
    """

    samples_per_s: float
    seconds: float
    wall_s: float
    staleness: Mapping[int, float]
    pools: tuple[PoolUse, ...]
    queues: Mapping[str, float]
    concurrency: float
    """Mean number of requests on a replica while it generates."""
    sample_tokens: float
    """Mean prompt and response tokens of a trained sample."""
    batches: Mapping[str, float]
    """Mean rollouts of a batch, by teacher."""

    @property
    def bottleneck(self) -> PoolUse:
        """The pool with the smallest limit."""
        return min(self.pools, key=lambda pool: pool.limit)

    @property
    def mean_staleness(self) -> float:
        """The mean over the samples, in weight versions."""
        return sum(value * share for value, share in self.staleness.items())


def predict(setting: Setting, *, seed: int = 0) -> Prediction:
    """Predicts a run of any length: the first part is simulated, the rest extrapolated."""
    short = shortened(setting)
    found = simulate(short, seed=seed, endless=short.steps < setting.steps)
    rest_s = (setting.steps - short.steps) * setting.batch_size / found.samples_per_s
    return replace(found, seconds=found.seconds + rest_s, wall_s=found.wall_s + rest_s)


def shortened(setting: Setting, samples: int = MAX_SAMPLES) -> Setting:
    """The setting with the steps of so many samples, at least with twice the warm-up."""
    versions = 2 * warmup_versions(setting.staleness_threshold)
    least = max(samples // setting.batch_size, versions * setting.sync_steps)
    return replace(setting, steps=min(setting.steps, least))


def simulate(setting: Setting, *, seed: int = 0, endless: bool = False) -> Prediction:
    """Predicts a run. The same setting and seed give the same prediction.

    ``endless`` admits as if more steps followed the last one: a steady state without an end.
    """
    return SimulatedRun(setting, seed, endless).run()


@dataclass(frozen=True)
class _Reading:
    """All integrals and counts at one moment."""

    time: float
    areas: Mapping[str, float]
    staleness: Counter[int]
    batches: Mapping[str, int]
    tokens: float


class SimulatedRun:
    """All parts of one simulated run."""

    def __init__(self, setting: Setting, seed: int, endless: bool) -> None:
        """ConfigError for a setting with more samples than can be simulated."""
        _refuse_too_many(setting)
        self._setting = setting
        self._clock = clock = Clock()
        self.population = population = Population(setting, seed)
        versions_ahead = int(setting.staleness_threshold) + 2
        self.admission = admission = Admission(
            batch_size=setting.batch_size,
            sync_steps=setting.sync_steps,
            staleness_threshold=setting.staleness_threshold,
            steps=setting.steps + endless * versions_ahead * setting.sync_steps,
        )
        self._topics: list[SimulatedTopic[int]] = [
            SimulatedTopic(clock, setting.queue_samples) for _ in setting.teachers
        ]
        self._scored: SimulatedTopic[int] = SimulatedTopic(clock, setting.queue_samples)
        self._rollouts = SimulatedRollouts(setting, clock, population, admission, self._topics)
        self._scoring = [
            SimulatedScoring(teacher, setting.prompt_tokens, clock, population, topic, self._scored)
            for teacher, topic in zip(setting.teachers, self._topics, strict=True)
        ]
        self.training = SimulatedTraining(
            setting, clock, population, admission, self._rollouts, self._scored, self._on_step
        )
        self._warm = self._read()

    def run(self) -> Prediction:
        """Simulates from the first admission to the end of the last step."""
        for scoring in self._scoring:
            scoring.start()
        self.training.start()
        self._rollouts.start()
        self._clock.run()
        return self._prediction(self._read())

    def _on_step(self, step: int) -> None:
        if step == self._setting.warmup_steps:
            self._warm = self._read()
        if step == self._setting.steps:
            self._clock.stop()

    def _read(self) -> _Reading:
        rollouts, training = self._rollouts, self.training
        levels = {PROMPTS: rollouts.prompts.ready, SCORED: self._scored.ready}
        for part in (rollouts, training):
            levels |= {name: at for name, at in vars(part).items() if isinstance(at, Level)}
        for teacher, scoring, topic in zip(
            self._setting.teachers, self._scoring, self._topics, strict=True
        ):
            levels[f"working/{teacher.name}"] = scoring.working
            levels[f"blocked/{teacher.name}"] = scoring.blocked
            levels[rollouts_topic(teacher.name)] = topic.ready
        areas = {name: level.area for name, level in levels.items()}
        batches = {
            teacher.name: scoring.batches
            for teacher, scoring in zip(self._setting.teachers, self._scoring, strict=True)
        }
        return _Reading(self._clock.now, areas, training.staleness.copy(), batches, training.tokens)

    def _prediction(self, end: _Reading) -> Prediction:
        """The prediction from the readings at the end of the warm-up and at the end."""
        setting, warm = self._setting, self._warm
        seconds = max(end.time - warm.time, 1e-12)
        means = {name: (area - warm.areas[name]) / seconds for name, area in end.areas.items()}
        trained = end.staleness - warm.staleness
        topics = [rollouts_topic(teacher.name) for teacher in setting.teachers]
        rate = trained.total() / seconds
        return Prediction(
            samples_per_s=rate,
            seconds=end.time,
            wall_s=end.time + setting.outside_s,
            staleness={v: trained[v] / trained.total() for v in sorted(trained)},
            pools=pool_uses(setting, means, rate),
            queues={topic: means[topic] for topic in (PROMPTS, *topics, SCORED)},
            concurrency=(means["running"] + means["waiting"])
            / max(means["working"] - means["paused"], 1e-12),
            sample_tokens=(end.tokens - warm.tokens) / trained.total(),
            batches={
                teacher.name: trained.total()
                * teacher.share
                / max(end.batches[teacher.name] - warm.batches[teacher.name], 1)
                for teacher in setting.teachers
            },
        )


def _refuse_too_many(setting: Setting) -> None:
    ahead = (setting.staleness_threshold + 2) * setting.sync_steps * setting.batch_size
    pool, queues = setting.rollout, len(setting.teachers) + 2
    room = (pool.replicas * pool.in_flight + queues * setting.queue_samples) * pool.n
    samples = setting.steps * setting.batch_size + min(ahead, room)
    if samples > MOST_SAMPLES:
        message = f"found {setting.batch_size}: the shortest simulation has {samples:.3g} samples"
        remedy = f"at most {MOST_SAMPLES} are simulated: plan a smaller batch, or fewer sync_steps"
        raise ConfigError.of("train.batch_size", message, remedy, "plan")


def pool_uses(setting: Setting, means: Mapping[str, float], rate: float) -> tuple[PoolUse, ...]:
    """The pools' shares of time, from the mean levels and the samples per second."""
    limits = setting.limits()
    pool = setting.rollout
    slots = pool.replicas * pool.running
    used = means["running"] / slots
    rollout_waits = {
        "staleness budget": means["starved"] / slots,
        "weight sync": means["paused"] / pool.replicas,
    }
    rollout_waits["turnaround"] = 1 - used - sum(rollout_waits.values())
    uses = [
        PoolUse(
            "rollout",
            pool.replicas,
            busy=means["working"] / pool.replicas,
            used=used,
            limit=limits["rollout"],
            waits=_largest_first(rollout_waits),
        )
    ]
    for teacher in setting.teachers:
        name = f"teacher/{teacher.name}"
        busy = means[f"working/{teacher.name}"] / teacher.replicas
        waits = {"rollouts": 1 - busy}
        if means[f"blocked/{teacher.name}"] > means[rollouts_topic(teacher.name)]:
            waits = {"room in the queue": 1 - busy}
        uses.append(
            PoolUse(
                name, teacher.replicas, busy, min(rate / limits[name], 1.0), limits[name], waits
            )
        )
    busy = means["computing"]
    waits = {
        "the weight sync before": means["held"],
        "copying weights out": means["copying"],
        "its turnaround": means["turning"],
    }
    waits["scored samples"] = 1 - busy - sum(waits.values())
    limit = limits["train"]
    uses.append(
        PoolUse("train", setting.ranks, busy, min(rate / limit, 1.0), limit, _largest_first(waits))
    )
    return tuple(uses)


def _largest_first(shares: Mapping[str, float]) -> dict[str, float]:
    return {
        name: max(share, 0.0) for name, share in sorted(shares.items(), key=lambda item: -item[1])
    }
