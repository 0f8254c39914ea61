"""Simulates one teacher's replicas as ``teachers.stage`` drives them, without engines.

topic rollouts/<teacher> ──lease of what is there──► fewest outstanding tokens ──► topic scored
"""

from __future__ import annotations

import heapq
from collections import deque
from itertools import count

from async_opd.tools.plan.setting import TeacherPoolSpec
from async_opd.tools.plan.sim.clock import Clock, Level
from async_opd.tools.plan.sim.population import Population
from async_opd.tools.plan.sim.topic import SimulatedTopic
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
