"""The student's replicas, simulated: what ``rollouter`` does, without engines.

    budget ──admit──► topic prompts ──as many as there is room for──► replica ──► topic of a teacher

All requests that run on a replica advance together, one token a step of ``step_s + n ·
step_s_per_request``, and new ones join with the next step. So a replica has a clock of steps, each
request a mark on that clock where it ends, and time passes from one mark to the next: no event per
token.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial

from async_opd.accounting.admission import Admission
from async_opd.plan.setting import Setting
from async_opd.plan.sim.clock import Clock, Level
from async_opd.plan.sim.population import Population
from async_opd.plan.sim.topic import SimulatedTopic

ADMITTED = 64
"""Most groups that are admitted at once."""
TOKEN = 1e-6
"""Rounding errors of the clock of steps are smaller."""


class SimulatedGroup:
    """Rollouts of one prompt, and the replica that has taken them."""

    __slots__ = ("left", "replica", "samples")

    def __init__(self, samples: Sequence[int]) -> None:
        self.samples = samples
        self.left = len(samples)
        self.replica: SimulatedReplica | None = None


class SimulatedReplica:
    """One engine: ``served`` steps so far, and at which count each running request ends."""

    __slots__ = (
        "asking",
        "closed",
        "counted",
        "drained",
        "finished",
        "held",
        "index",
        "marks",
        "paused",
        "served",
        "since",
        "timer",
        "turns",
        "version",
        "waiting",
    )

    def __init__(self, index: int) -> None:
        self.index = index
        self.version = 0
        self.served = 0.0
        self.since = 0.0
        self.marks: list[tuple[int, int]] = []
        self.waiting: deque[int] = deque()  # in the engine, for one of its slots
        self.held: list[int] = []  # for the end of a pause
        self.turns: deque[int] = deque()  # for a place among the requests in flight
        self.finished = 0  # groups to acknowledge with the next get
        self.asking = ""  # "soon": on its way to the queue; "now": waits there for groups
        self.closed = False  # takes no new request
        self.paused = False  # and decodes none
        self.drained: Callable[[], None] | None = None
        self.timer = 0  # number of the event that counts; earlier ones are void
        self.counted = (0, 0, 0, 0)  # what it adds to the levels

    @property
    def in_flight(self) -> int:
        """Requests given to the engine and not finished."""
        return len(self.marks) + len(self.waiting) + len(self.held)


class SimulatedRollouts:
    """Admits, hands out, decodes, pauses."""

    def __init__(
        self,
        setting: Setting,
        clock: Clock,
        population: Population,
        admission: Admission,
        topics: Sequence[SimulatedTopic[int]],
    ) -> None:
        """``topics[i]`` is that of teacher i."""
        self.running = Level(clock)
        """Requests that get tokens."""
        self.waiting = Level(clock)
        """Requests that wait in an engine for a slot."""
        self.starved = Level(clock)
        """Engine slots that are empty because topic prompts is: the budget is used up."""
        self.working = Level(clock)
        """Replicas with any request, paused or not."""
        self.paused = Level(clock)
        """Replicas that are paused."""
        self.prompts: SimulatedTopic[SimulatedGroup] = SimulatedTopic(clock, setting.queue_samples)
        self._pool = setting.rollout
        self._clock = clock
        self._population = population
        self._admission = admission
        self._topics = topics
        self._replicas = [SimulatedReplica(index) for index in range(self._pool.replicas)]
        self._groups: dict[int, SimulatedGroup] = {}
        self._touched: dict[int, SimulatedReplica] = {}
        self._evaluating = False
        self._putting = self._filling = False

    # ── admission ──────────────────────────────────────────────────────────────────────────────

    def start(self) -> None:
        """Every replica asks for groups, and the first are admitted."""
        for replica in self._replicas:
            self._look(replica)
        self.fill()

    def fill(self) -> None:
        """Admits while the budget has groups and topic prompts has room."""
        self._filling = True
        while not self._putting:
            admitted = self._admission.try_admit(self._pool.n, ADMITTED)
            if not admitted:
                break
            self._putting = True
            groups = [SimulatedGroup(self._population.group()) for _ in range(admitted)]
            self.prompts.put(groups, self._put)
        self._filling = False

    def _put(self) -> None:
        self._putting = False
        if not self._filling:
            self.fill()

    def rerun(self, samples: Sequence[int]) -> None:
        """Samples came too late to be trained: each runs again, as a group of its own."""
        for sample in samples:
            self._population.again(sample)
        self.prompts.put([SimulatedGroup((sample,)) for sample in samples], _nothing)

    # ── slots ──────────────────────────────────────────────────────────────────────────────────

    def _look(self, replica: SimulatedReplica) -> None:
        """Goes to the queue if there is room for more requests in flight."""
        room = self._pool.in_flight - replica.in_flight
        if replica.asking or replica.turns or room <= 0:
            return
        replica.asking = "soon"
        groups = max(1, room // self._pool.n)
        if self._pool.turnaround_s:
            self._clock.after(self._pool.turnaround_s, self._ask, replica, groups)
        else:
            self._ask(replica, groups)

    def _ask(self, replica: SimulatedReplica, groups: int) -> None:
        replica.asking = "now"
        self._touch(replica)
        finished, replica.finished = replica.finished, 0
        self.prompts.ack(finished)
        self.prompts.get(1, groups, partial(self._take, replica), share=True)

    def _take(self, replica: SimulatedReplica, groups: list[SimulatedGroup]) -> None:
        replica.asking = ""
        self._serve(replica)
        for group in groups:
            group.replica = replica
            for sample in group.samples:
                self._groups[sample] = group
            replica.turns += group.samples
        self._take_turns(replica)

    def _take_turns(self, replica: SimulatedReplica) -> None:
        """Requests enter the engine, and its slots."""
        while replica.turns and replica.in_flight < self._pool.in_flight:
            sample = replica.turns.popleft()
            if replica.closed:
                replica.held.append(sample)
            else:
                replica.waiting.append(sample)
        self._take_slots(replica)
        self._look(replica)

    def _take_slots(self, replica: SimulatedReplica) -> None:
        step = math.ceil(replica.served - TOKEN)  # the one under way goes on without them
        lengths, slots = self._population.lengths, self._pool.speed.slots
        while replica.waiting and len(replica.marks) < slots and not replica.paused:
            sample = replica.waiting.popleft()
            self._population.oldest[sample] = replica.version
            heapq.heappush(replica.marks, (step + lengths[sample], sample))

    # ── decoding ───────────────────────────────────────────────────────────────────────────────

    def _serve(self, replica: SimulatedReplica) -> None:
        """Brings the replica's clock of steps to now."""
        now = self._clock.now
        if replica.marks and not replica.paused:
            replica.served += (now - replica.since) / self._pool.speed.step(len(replica.marks))
        replica.since = now
        self._touch(replica)

    def _touch(self, replica: SimulatedReplica) -> None:
        if not self._touched:
            self._clock.then(self._settle)
        self._touched[replica.index] = replica

    def _settle(self) -> None:
        """The next mark, and the levels, of every replica that was touched."""
        for replica in self._touched.values():
            replica.timer += 1
            if replica.marks and not replica.paused:
                left = replica.marks[0][0] - replica.served
                left_s = left * self._pool.speed.step(len(replica.marks))
                self._clock.at(replica.since + left_s, self._reached, replica, replica.timer)
            self._count(replica)
        self._touched.clear()

    def _count(self, replica: SimulatedReplica) -> None:
        works = int(self._evaluating or replica.in_flight > 0)
        if replica.paused:
            counts = (0, 0, 0, works)
        else:
            running = len(replica.marks)
            starved = self._pool.running - running if replica.asking == "now" else 0
            counts = (running, len(replica.waiting), max(starved, 0), works)
        if counts != replica.counted:
            levels = (self.running, self.waiting, self.starved, self.working)
            for level, new, old in zip(levels, counts, replica.counted, strict=True):
                if new != old:
                    level.add(new - old)
            replica.counted = counts

    def _reached(self, replica: SimulatedReplica, timer: int) -> None:
        """The next mark: the requests that end there leave."""
        if timer != replica.timer:
            return
        self._serve(replica)
        replica.served = replica.marks[0][0]
        done: dict[int, list[int]] = {}
        while replica.marks and replica.marks[0][0] <= replica.served:
            _, sample = heapq.heappop(replica.marks)
            done.setdefault(self._population.teachers[sample], []).append(sample)
        self._take_turns(replica)
        for teacher, samples in done.items():
            self._topics[teacher].put(samples, partial(self._sent, samples))
        if replica.drained and not replica.marks:
            self._freeze(replica)

    def _sent(self, samples: list[int]) -> None:
        for sample in samples:
            group = self._groups.pop(sample)
            group.left -= 1
            if not group.left and group.replica is not None:
                group.replica.finished += 1

    # ── pauses ─────────────────────────────────────────────────────────────────────────────────

    def pause(self, replica: int, then: Callable[[], None], *, drain: bool) -> None:
        """Stops a replica, at once or when its requests have ended; then calls ``then``."""
        stopped = self._replicas[replica]
        stopped.closed = True
        stopped.drained = then
        if not (drain and stopped.marks):
            self._freeze(stopped)

    def _freeze(self, replica: SimulatedReplica) -> None:
        self._serve(replica)
        replica.paused = True
        self.paused.add(1)
        then, replica.drained = replica.drained, None
        if then is not None:
            then()

    def resume(self, replica: int, version: int | None = None) -> None:
        """Goes on, with other weights if a version is given."""
        resumed = self._replicas[replica]
        self._serve(resumed)
        if version is not None:
            resumed.version = version
        resumed.closed = resumed.paused = False
        self.paused.add(-1)
        resumed.waiting += resumed.held
        resumed.held = []
        self._take_turns(resumed)

    def evaluate(self, seconds: float, then: Callable[[], None]) -> None:
        """Every replica works on an evaluation; rollouts wait. Then calls ``then``."""
        self._evaluating = True
        for index in range(len(self._replicas)):
            self.pause(index, _nothing, drain=False)
        self._clock.after(seconds, self._evaluated, then)

    def _evaluated(self, then: Callable[[], None]) -> None:
        self._evaluating = False
        for index in range(len(self._replicas)):
            self.resume(index)
        then()


def _nothing() -> None:
    """Nobody waits for this."""
