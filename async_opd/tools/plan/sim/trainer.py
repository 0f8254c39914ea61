"""Simulates the trainer and the weight sync: ``trainer.batcher``, the pipeline's train and push.

scored ──batcher──► B samples ──► step ──every K steps──► snapshot ──► replicas pause, v + 1
           └──staler than max_version_lag──► sampled again
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence

from async_opd.accounting.admission import Admission
from async_opd.tools.plan.setting import Setting
from async_opd.tools.plan.sim.clock import Clock, Level, SimulatedTopic
from async_opd.tools.plan.sim.population import Population
from async_opd.tools.plan.sim.rollouter import SimulatedRollouts


class SimulatedBatcher:
    """Turns scored samples into batches; fetches the next one while one is trained."""

    def __init__(
        self, setting: Setting, population: Population, scored: SimulatedTopic[int]
    ) -> None:
        self.requeued = 0
        self._size = setting.batch_size
        self._group = setting.rollout.n if setting.whole_groups else 1
        self._max_lag = setting.max_version_lag
        self._population = population
        self._scored = scored
        self._held: dict[int, None] = {}  # samples in the order they came
        self._fetching = False
        self._wanted: Callable[[], None] | None = None

    def take(self, version: int, rerun: Callable[[list[int]], None]) -> list[int]:
        """A batch that may be trained at ``version``; empty if there is none yet.

        Samples that are too stale are passed to ``rerun``.
        """
        if self._max_lag is not None:
            oldest = self._population.oldest
            old = [s for s in self._held if version - oldest[s] > self._max_lag]
            if old:
                self._leave(old)
                self.requeued += len(old)
                rerun(old)
        batch = self._whole_groups()
        self._leave(batch)
        return batch

    def on_more(self, then: Callable[[], None]) -> None:
        """Calls ``then`` once when more samples have come."""
        self._wanted = then
        self.fetch()

    def fetch(self) -> None:
        """Asks for the samples that a batch lacks, or for any that may complete its groups."""
        if self._fetching:
            return
        self._fetching = True
        missing = max(self._size - len(self._held), 1)
        self._scored.get(missing, missing if self._group == 1 else self._size, self._fetched)

    def _fetched(self, samples: list[int]) -> None:
        self._fetching = False
        self._held |= dict.fromkeys(samples)
        then, self._wanted = self._wanted, None
        if then is not None:
            then()

    def _whole_groups(self) -> list[int]:
        if len(self._held) < self._size:
            return []
        groups: dict[int, list[int]] = {}
        chosen: list[int] = []
        for sample in self._held:
            group = groups.setdefault(sample // self._group, [])
            group.append(sample)
            if len(group) == self._group:
                chosen += group
                if len(chosen) == self._size:
                    return chosen
        return []

    def _leave(self, samples: list[int]) -> None:
        for sample in samples:
            del self._held[sample]


class SimulatedTraining:
    """Trains batches one after the other until it is stopped, and syncs the weights."""

    def __init__(
        self,
        setting: Setting,
        clock: Clock,
        population: Population,
        admission: Admission,
        rollouts: SimulatedRollouts,
        scored: SimulatedTopic[int],
        on_step: Callable[[int], None],
    ) -> None:
        """``on_step`` is called with the number of each step when it ends."""
        self.computing = Level(clock)
        """1 while it trains."""
        self.copying = Level(clock)
        """1 while it copies weights out."""
        self.turning = Level(clock)
        """1 during the turnaround between two steps."""
        self.held = Level(clock)
        """1 while it waits for the previous weight sync."""
        self.staleness: Counter[int] = Counter()
        """Samples trained so far, by staleness."""
        self.tokens = 0.0
        """Prompt and response tokens trained so far."""
        self.version = 0
        """The weights after the last snapshot."""
        self.batcher = SimulatedBatcher(setting, population, scored)
        self._setting = setting
        self._clock = clock
        self._population = population
        self._admission = admission
        self._rollouts = rollouts
        self._scored = scored
        self._on_step = on_step
        self._step = 0
        self._pushing = False

    def start(self) -> None:
        """Trains the next batch, at once or as soon as there is one."""
        batch = self.batcher.take(self.version, self._send_back)
        if batch:
            self._train(batch)
        else:
            self.batcher.on_more(self.start)

    def _send_back(self, samples: list[int]) -> None:
        self._scored.ack(len(samples))
        self._rollouts.rerun(samples)

    def _train(self, samples: list[int]) -> None:
        lengths, oldest = self._population.lengths, self._population.oldest
        self.staleness.update(self.version - oldest[sample] for sample in samples)
        tokens = sum(lengths[s] for s in samples) + len(samples) * self._setting.prompt_tokens
        self.tokens += tokens
        self.computing.add(1)
        self._clock.after(self._setting.train.seconds(tokens, self._setting.ranks), self._trained)
        self.batcher.fetch()

    def _trained(self) -> None:
        self.computing.add(-1)
        self._scored.ack(self._setting.batch_size)
        self._step += 1
        self._on_step(self._step)
        self.turning.add(1)
        self._clock.after(self._setting.train.turnaround_s, self._turned)

    def _turned(self) -> None:
        self.turning.add(-1)
        if self._step % self._setting.sync_steps:
            self.start()
        elif self._pushing:
            self.held.add(1)
        else:
            self._snapshot()

    def _snapshot(self) -> None:
        self.copying.add(1)
        self._clock.after(self._setting.train.snapshot_s, self._copied)

    def _copied(self) -> None:
        self.copying.add(-1)
        self.version += 1
        self._pushing = True
        everyone = range(self._setting.rollout.replicas)
        groups = [[index] for index in everyone] if self._setting.rolling else [everyone]
        self._update(iter(groups))
        self.start()

    # ── weight sync ────────────────────────────────────────────────────────────────────────────

    def _update(self, groups: Iterator[Sequence[int]]) -> None:
        """Pauses the next sync group, gives it the weights and resumes it; then the others."""
        group = next(groups, None)
        if group is None:
            self._updated()
            return
        left = len(group)

        def paused() -> None:
            nonlocal left
            left -= 1
            if not left:
                self._clock.after(self._setting.train.sync_s, resume)

        def resume() -> None:
            for replica in group:
                self._rollouts.resume(replica, self.version)
            self._update(groups)

        drain = self._setting.on_sync == "finish"
        for replica in group:
            self._rollouts.pause(replica, paused, drain=drain)

    def _updated(self) -> None:
        """Opens the budget of the version, which every replica has now."""
        self._admission.advance(self.version)
        self._rollouts.fill()
        every = self._setting.evaluation_every
        if every and self.version % every == 0:
            self._rollouts.evaluate(self._setting.evaluation_s)
        self._pushing = False
        if self.held.value:
            self.held.add(-1)
            self._snapshot()
