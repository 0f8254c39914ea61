"""Simulates the student's replicas as ``rollouter`` drives them, without engines.

    budget ──admit──► topic prompts ──as many as there is room for──► replica ──► topic of a teacher

All requests that run on a replica advance together, one token a step of ``step_s + n ·
step_s_per_request``, and new ones join with the next step. So a replica counts its steps, each
request has a mark, the count at which it ends, and one event brings the time to the next mark: no
event per token. Answers of an evaluation are counted only: a step has more requests meanwhile.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

from async_opd.accounting.admission import Admission
from async_opd.tools.plan.setting import Setting
from async_opd.tools.plan.sim.clock import Clock, Level, SimulatedTopic
from async_opd.tools.plan.sim.population import Population
from rollouter.slots import for_evaluation

ADMITTED = 64
"""The most groups that are admitted at once."""
TOKEN = 1e-6
"""An upper bound of the rounding errors of the count of steps."""


class SimulatedGroup:
    """The rollouts of one prompt: ``left`` of them run on the ``replica`` that has them."""

    __slots__ = ("left", "replica", "samples")

    def __init__(self, samples: Sequence[int]) -> None:
        self.samples = samples
        self.left = len(samples)
        self.replica: SimulatedReplica | None = None


@dataclass(slots=True, eq=False)
class SimulatedReplica:
    """One engine: ``served`` steps until ``since``, and the count at which each request ends."""

    index: int
    version: int = 0
    served: float = 0.0
    since: float = 0.0
    marks: list[tuple[int, int]] = field(default_factory=list)  # (step at which it ends, sample)
    waiting: deque[int] = field(default_factory=deque)  # in the engine, for one of its slots
    held: list[int] = field(default_factory=list)  # for the end of a pause
    queued: deque[int] = field(default_factory=deque)  # until fewer requests are in flight
    finished: int = 0  # groups to acknowledge with the next get
    asking: str = ""  # "soon": on the way to the queue; "now": waits there for groups
    closed: bool = False  # accepts no new request
    paused: bool = False  # decodes no request
    drained: Callable[[], None] | None = None
    timer: int = 0  # the number of the valid event; those with earlier numbers are ignored
    counted: tuple[int, int, int, int] = (0, 0, 0, 0)  # the replica's part of the levels

    @property
    def in_flight(self) -> int:
        """Requests given to the engine and not finished."""
        return len(self.marks) + len(self.waiting) + len(self.held)


class SimulatedRollouts:
    """Simulates admission, slots, decoding and pauses of all replicas."""

    def __init__(
        self,
        setting: Setting,
        clock: Clock,
        population: Population,
        admission: Admission,
        topics: Sequence[SimulatedTopic[int]],
    ) -> None:
        """``topics[i]`` is the topic of teacher i."""
        self.running = Level(clock)
        """Requests that are decoded."""
        self.waiting = Level(clock)
        """Requests that wait in an engine for a slot."""
        self.starved = Level(clock)
        """Engine slots that are empty because topic prompts is empty: the budget is used up."""
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
        """Lets every replica ask for groups, and admits the first ones."""
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
        """Samples stale samples again, each as a separate group."""
        for sample in samples:
            self._population.again(sample)
        self.prompts.put([SimulatedGroup((sample,)) for sample in samples], _nothing)

    # ── slots ──────────────────────────────────────────────────────────────────────────────────

    def _look(self, replica: SimulatedReplica) -> None:
        """Asks the queue for groups if there is room for more requests in flight."""
        room = self._pool.in_flight - replica.in_flight
        if replica.asking or replica.queued or room <= 0:
            return
        replica.asking = "soon"
        groups = max(1, room // self._pool.n)
        if self._pool.speed.turnaround_s:
            self._clock.after(self._pool.speed.turnaround_s, self._ask, replica, groups)
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
            replica.queued += group.samples
        self._enter_engine(replica)

    def _enter_engine(self, replica: SimulatedReplica) -> None:
        """Moves queued requests into the engine, and from there into its slots."""
        while replica.queued and replica.in_flight < self._pool.in_flight:
            sample = replica.queued.popleft()
            if replica.closed:
                replica.held.append(sample)
            else:
                replica.waiting.append(sample)
        self._take_slots(replica)
        self._look(replica)

    def _take_slots(self, replica: SimulatedReplica) -> None:
        step = math.ceil(replica.served - TOKEN)  # new requests join after the current step
        lengths, slots = self._population.lengths, self._pool.slots
        while replica.waiting and len(replica.marks) < slots and not replica.paused:
            sample = replica.waiting.popleft()
            self._population.oldest[sample] = replica.version
            heapq.heappush(replica.marks, (step + lengths[sample], sample))

    # ── decoding ───────────────────────────────────────────────────────────────────────────────

    def _serve(self, replica: SimulatedReplica) -> None:
        """Brings the replica's count of steps to now."""
        now = self._clock.now
        if replica.marks and not replica.paused:
            replica.served += (now - replica.since) / self._step_s(replica)
        replica.since = now
        self._touch(replica)

    def _step_s(self, replica: SimulatedReplica) -> float:
        """Seconds in which every request that runs gets a token; more requests than slots share."""
        running = len(replica.marks)
        if self._evaluating:
            running += for_evaluation(self._pool.in_flight, replica.in_flight)
        seated = min(running, max(self._pool.slots, len(replica.marks)))
        return self._pool.speed.step(seated) * running / seated

    def _touch(self, replica: SimulatedReplica) -> None:
        if not self._touched:
            self._clock.then(self._settle)
        self._touched[replica.index] = replica

    def _settle(self) -> None:
        """Schedules the next mark and updates the levels of every replica that has changed."""
        for replica in self._touched.values():
            replica.timer += 1
            if replica.marks and not replica.paused:
                left = replica.marks[0][0] - replica.served
                left_s = left * self._step_s(replica)
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
        """Ends the requests whose mark is reached."""
        if timer != replica.timer:
            return
        self._serve(replica)
        replica.served = replica.marks[0][0]
        done: dict[int, list[int]] = {}
        while replica.marks and replica.marks[0][0] <= replica.served:
            _, sample = heapq.heappop(replica.marks)
            done.setdefault(self._population.teachers[sample], []).append(sample)
        self._enter_engine(replica)
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
        """Stops a replica, with ``drain`` after its requests have ended; then calls ``then``."""
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
        """Resumes a replica, with new weights if a version is given."""
        resumed = self._replicas[replica]
        self._serve(resumed)
        if version is not None:
            resumed.version = version
        resumed.closed = resumed.paused = False
        self.paused.add(-1)
        resumed.waiting += resumed.held
        resumed.held = []
        self._enter_engine(resumed)

    def evaluate(self, seconds: float) -> None:
        """Lets all replicas answer an evaluation beside rollouts, unless they do already."""
        if not self._evaluating:
            self._evaluate(True)
            self._clock.after(seconds, self._evaluate, False)

    def _evaluate(self, evaluating: bool) -> None:
        for replica in self._replicas:
            self._serve(replica)  # at the speed until now
        self._evaluating = evaluating


def _nothing() -> None:
    """A callback that does nothing."""
