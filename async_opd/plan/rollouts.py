"""The student's replicas, simulated: what ``rollouter`` does, without engines.

    budget ──admit──► groups ──fewest outstanding tokens──► replica ──finished──► topic of a teacher

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

from async_opd.core.admission import Admission
from async_opd.plan.balance import Balance
from async_opd.plan.clock import Clock, Level
from async_opd.plan.population import Population
from async_opd.plan.setting import Setting
from async_opd.plan.topic import Topic

TOKEN = 1e-6
"""Rounding errors of the clock of steps are smaller."""


class Group:
    """A group and its replica; its place is free when all of it is in the queue."""

    __slots__ = ("left", "replica", "tokens")

    def __init__(self, replica: Replica, size: int, tokens: int) -> None:
        self.replica = replica
        self.left = size
        self.tokens = tokens


class Replica:
    """One engine: ``served`` steps so far, and at which count each running request ends."""

    __slots__ = (
        "closed",
        "drained",
        "groups",
        "held",
        "index",
        "marks",
        "paused",
        "served",
        "since",
        "timer",
        "version",
        "waiting",
    )

    def __init__(self, index: int) -> None:
        self.index = index
        self.version = 0
        self.served = 0.0
        self.since = 0.0
        self.marks: list[tuple[int, int]] = []
        self.waiting: deque[int] = deque()  # for a slot
        self.held: list[int] = []  # for the end of a pause
        self.groups = 0
        self.closed = False  # takes no new request
        self.paused = False  # and decodes none
        self.drained: Callable[[], None] | None = None
        self.timer = 0  # number of the event that counts; earlier ones are void

    @property
    def idle(self) -> bool:
        """Whether it has no request."""
        return not (self.marks or self.waiting or self.held)


class Rollouts:
    """Admits, balances, decodes, pauses."""

    def __init__(
        self,
        setting: Setting,
        clock: Clock,
        population: Population,
        admission: Admission,
        topics: Sequence[Topic],
    ) -> None:
        """``topics[i]`` is that of teacher i."""
        pool = setting.rollout
        self.running = Level(clock)
        """Requests that get tokens."""
        self.working = Level(clock)
        """Replicas with any request, paused or not."""
        self.free = Level(clock)
        """Places for groups on replicas that are not paused: the budget has none for them."""
        self.blocked = Level(clock)
        """Finished rollouts that wait for room in the queue."""
        self.paused = Level(clock)
        """Replicas that are paused."""
        self._setting = setting
        self._speed = pool.speed
        self._turnaround_s = pool.turnaround_s
        self._clock = clock
        self._population = population
        self._admission = admission
        self._topics = topics
        self._replicas = [Replica(index) for index in range(pool.replicas)]
        self._balance = Balance(pool.replicas, pool.groups)
        self._groups: dict[int, Group] = {}
        self._touched: dict[int, Replica] = {}
        self._again: deque[int] = deque()
        self._evaluating = False
        self._ending = False
        self.free.add(self._balance.free)

    # ── admission and balance ──────────────────────────────────────────────────────────────────

    def fill(self) -> None:
        """Starts groups while the budget has some and replicas have places."""
        n = self._setting.rollout.n
        while self._again and self._balance.free:
            self._start((self._again.popleft(),))
        while self._balance.free:
            admitted = self._admission.try_admit(n, self._balance.free)
            if not admitted:
                break
            for _ in range(admitted):
                self._start(self._population.group())
        self._reschedule()

    def rerun(self, samples: Sequence[int]) -> None:
        """Samples came too late to be trained: each runs again, as a group of its own."""
        for sample in samples:
            self._population.again(sample)
        self._again += samples
        self.fill()

    def _start(self, samples: Sequence[int]) -> None:
        tokens = round(len(samples) * self._setting.lengths.most + self._setting.prompt_tokens)
        replica = self._replicas[self._balance.take(tokens)]
        group = Group(replica, len(samples), tokens)
        self._occupy(replica, 1)
        if replica.idle and not self._evaluating:
            self.working.add(1)
        for sample in samples:
            self._groups[sample] = group
        if replica.closed:
            replica.held += samples
            return
        self._serve(replica)
        replica.waiting += samples
        self._take_slots(replica)

    def _occupy(self, replica: Replica, places: int) -> None:
        replica.groups += places
        if not replica.paused:
            self.free.add(-places)

    # ── decoding ───────────────────────────────────────────────────────────────────────────────

    def _serve(self, replica: Replica) -> None:
        """Brings the replica's clock of steps to now."""
        now = self._clock.now
        if replica.marks and not replica.paused:
            replica.served += (now - replica.since) / self._speed.step(len(replica.marks))
        replica.since = now
        self._touched[replica.index] = replica

    def _take_slots(self, replica: Replica) -> None:
        started = min(len(replica.waiting), self._speed.slots - len(replica.marks))
        step = math.ceil(replica.served - TOKEN)  # the one under way goes on without them
        for _ in range(started):
            sample = replica.waiting.popleft()
            self._population.oldest[sample] = replica.version
            heapq.heappush(replica.marks, (step + self._population.lengths[sample], sample))
        self.running.add(started)

    def _reschedule(self) -> None:
        """The next mark of every replica that was touched."""
        for replica in self._touched.values():
            replica.timer += 1
            if replica.marks and not replica.paused:
                left = replica.marks[0][0] - replica.served
                seconds = left * self._speed.step(len(replica.marks))
                self._clock.after(seconds, self._reached, replica, replica.timer)
        self._touched.clear()

    def _reached(self, replica: Replica, timer: int) -> None:
        """The next mark: the requests that end there leave."""
        if timer != replica.timer:
            return
        self._serve(replica)
        replica.served = replica.marks[0][0]
        done: dict[int, list[int]] = {}
        before = len(replica.marks)
        while replica.marks and replica.marks[0][0] <= replica.served:
            _, sample = heapq.heappop(replica.marks)
            done.setdefault(self._population.teachers[sample], []).append(sample)
        self.running.add(len(replica.marks) - before)
        self._take_slots(replica)
        if replica.idle and not self._evaluating:
            self.working.add(-1)
        self._ending = True
        for teacher, samples in done.items():
            self._send(teacher, samples)
        self._ending = False
        if replica.drained and not replica.marks:
            self._freeze(replica)
        self.fill()

    def _send(self, teacher: int, samples: list[int]) -> None:
        self.blocked.add(len(samples))

        def sent() -> None:
            self.blocked.add(-len(samples))
            for sample in samples:
                group = self._groups.pop(sample)
                group.left -= 1
                if not group.left and self._turnaround_s:
                    self._clock.after(self._turnaround_s, self._free, group)
                elif not group.left:
                    self._leave(group)
            if not self._ending:
                self.fill()

        self._topics[teacher].put(samples, sent)

    def _free(self, group: Group) -> None:
        self._leave(group)
        self.fill()

    def _leave(self, group: Group) -> None:
        self._balance.give_back(group.replica.index, group.tokens)
        self._occupy(group.replica, -1)

    # ── pauses ─────────────────────────────────────────────────────────────────────────────────

    def pause(self, replica: int, then: Callable[[], None], *, drain: bool) -> None:
        """Stops a replica, at once or when its requests have ended; then calls ``then``."""
        stopped = self._replicas[replica]
        stopped.closed = True
        stopped.drained = then
        if not (drain and stopped.marks):
            self._freeze(stopped)
            self._reschedule()

    def _freeze(self, replica: Replica) -> None:
        self._serve(replica)
        replica.paused = True
        self.paused.add(1)
        self.running.add(-len(replica.marks))
        self.free.add(replica.groups - self._setting.rollout.groups)
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
        self.running.add(len(resumed.marks))
        self.free.add(self._setting.rollout.groups - resumed.groups)
        resumed.waiting += resumed.held
        resumed.held = []
        self._take_slots(resumed)
        self._reschedule()

    def evaluate(self, seconds: float, then: Callable[[], None]) -> None:
        """Every replica works on an evaluation; rollouts wait. Then calls ``then``."""
        idle = sum(replica.idle for replica in self._replicas)
        self._evaluating = True
        self.working.add(idle)
        for index in range(len(self._replicas)):
            self.pause(index, _nothing, drain=False)
        self._clock.after(seconds, self._evaluated, then)

    def _evaluated(self, then: Callable[[], None]) -> None:
        self._evaluating = False
        self.working.add(-sum(replica.idle for replica in self._replicas))
        for index in range(len(self._replicas)):
            self.resume(index)
        then()


def _nothing() -> None:
    """Nobody waits for this."""
